"""Predict a training step on TPUs on paper: counted work divided by the chip's rates.

    pip install ".[jax,hub,tpu]"
    python benchmarks/roofline.py [--lengths 8192 32768 65536] [--chips 1 16 256]

The model is GPT-2 small in mixed bfloat16 with one sequence, on a v5e of 197
tera-operations and 819 GB a second that exchanges 200 GB a second (its documentation).
A step takes at least its operations divided by their rate, or its bytes divided by
theirs, whichever is longer; exchange is added. **Nothing is timed**: a real step takes
longer, by a factor that is not known without a chip.

Operations and bytes are the compiler's own counts (benchmarks/tpu.py) for one layer and
for two, which are extrapolated to twelve. The compiler counts a loop once. Linear
attention is therefore counted with sequences of one block, 1 and 4 of them, and
extrapolated in proportion to tokens. Softmax has no loop; it is counted at three
lengths and extrapolated as a parabola. Over several chips a sequence is divided
(`SequenceParallel`): each chip gathers the sums of all others in every layer, forward
and backward, and gradients of all weights are added up. The prediction does not check
whether softmax would fit.
"""

import argparse
import json
import sys

BLOCK, SOFTMAX = 512, (512, 1024, 2048)
OPERATIONS, BYTES, EXCHANGE = 197e12, 819e9, 200e9
LAYERS, HEADS, HEAD_DIM, WIDTH, WEIGHTS = 12, 12, 64, 256, 124e6


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [8192, 32768, 65536]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--chips", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--results", default="roofline.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()
    # `tpu.parse_arguments` then returns its defaults except for the block size.
    sys.argv = [sys.argv[0], "--block-size", str(BLOCK)]

import numpy as np
import tpu
from keras import ops


def counts(mechanism, length, batch=1):
    """Returns operations and bytes of a step, extrapolated from one and two layers."""
    one, two = (counted(mechanism, length, batch, layers) for layers in (1, 2))
    return one + (LAYERS - 1) * (two - one)


def not_taken(query, key, mask, groups, dtype):
    """Replaces `unbounded_weights`, a branch for logits in the hundreds."""
    row = 0 * query.log_scale[..., 0]
    weights = ops.zeros((*row.shape, key.log_scale.shape[-2]), row.dtype)
    return (weights,), row


def counted(mechanism, length, batch, layers):
    options = tpu.parse_arguments()
    options.layers = layers
    # The compiler counts this branch although it is not taken at run time.
    sys.modules["keras_rfattn.ops.causal"].unbounded_weights = not_taken
    program = tpu.compiled(*tpu.step(options, mechanism, length, batch), options.chip)
    cost = program.cost_analysis()
    print(mechanism, length, batch, layers, cost["flops"], cost["bytes accessed"])
    return np.array([cost["flops"], cost["bytes accessed"]])


def work():
    """Returns a dict of functions from the tokens of a chip to operations and bytes."""
    one, four = counts("favorpp", BLOCK), counts("favorpp", BLOCK, 4)
    each = (four - one) / (3 * BLOCK)
    some = [counts("softmax", length) for length in SOFTMAX]
    parabola = np.polyfit(SOFTMAX, some, 2)
    return {
        "favorpp": lambda tokens: one + (tokens - BLOCK) * each,
        "softmax": lambda tokens: np.array([tokens**2, tokens, 1]) @ parabola,
    }


def exchanged(mechanism, chips):
    """Returns the bytes that a chip receives in a step."""
    if chips == 1:
        return 0
    gradients = 2 * 4 * WEIGHTS
    sums = 4 * HEADS * WIDTH * (HEAD_DIM + 2)
    return gradients + (2 * LAYERS * chips * sums if mechanism == "favorpp" else 0)


def main(args):
    for mechanism, needed in work().items():
        for tokens in args.lengths:
            for chips in args.chips if mechanism == "favorpp" else [1]:
                operations, moved = needed(tokens / chips)
                parts = {
                    "operations": operations / OPERATIONS,
                    "bytes": moved / BYTES,
                    "exchange": exchanged(mechanism, chips) / EXCHANGE,
                }
                least = max(parts["operations"], parts["bytes"]) + parts["exchange"]
                row = {
                    "mechanism": mechanism, "tokens": tokens, "chips": chips,
                    "tera-operations": round(operations / 1e12, 2),
                    "GB": round(moved / 1e9, 1),
                    **{f"ms of {k}": round(1000 * v, 2) for k, v in parts.items()},
                    "ms, predicted": round(1000 * least, 2),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                with open(args.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
