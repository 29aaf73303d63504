"""Predictions, on paper, of a training step on TPUs: counted work by the chip's rates.

    pip install ".[jax,hub,tpu]"
    python benchmarks/roofline.py [--lengths 8192 32768 65536] [--chips 1 16 256]

GPT-2 small, mixed bfloat16, one sequence, a v5e of 197 tera-operations and 819 GB a
second that exchanges 200 GB a second (its documentation). A step takes at least
operations by their rate, and bytes by theirs, whichever is more; what is exchanged
comes on top. **Nothing is timed**: a real step takes longer, by a factor that is not
known without a chip.

Operations and bytes are the compiler's own counts (benchmarks/tpu.py) of one layer and
of two, which tell those of twelve. It counts a loop once, so that linear attention is
counted at sequences of one block, 1 and 4 of them, and goes on in proportion to tokens;
softmax, which has no loop, at three lengths, and goes on as a parabola. Over several
chips a sequence is divided (`SequenceParallel`): each gathers the sums of all others in
every layer, forward and backward, and gradients of all weights are added up. Whether
softmax would fit is not asked.
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
    parser.add_argument("--results", default="roofline.jsonl", help="appended to")
    return parser.parse_args()


if __name__ == "__main__":  # before imports that take seconds
    args = parse_arguments()
    # Its flags are its defaults.
    sys.argv = [sys.argv[0], "--block-size", str(BLOCK)]

import numpy as np
import tpu
from keras import ops


def counts(mechanism, length, batch=1):
    """Operations and bytes of a step, of all layers by those of one and of two."""
    one, two = (counted(mechanism, length, batch, layers) for layers in (1, 2))
    return one + (LAYERS - 1) * (two - one)


def not_taken(query, key, mask, groups, dtype):
    """Takes the place of `unbounded_weights`, which serves logits in the hundreds."""
    row = 0 * query.log_scale[..., 0]
    weights = ops.zeros((*row.shape, key.log_scale.shape[-2]), row.dtype)
    return (weights,), row


def counted(mechanism, length, batch, layers):
    options = tpu.parse_arguments()
    options.layers = layers
    # A branch that is not taken would be counted.
    sys.modules["keras_rfattn.ops.causal"].unbounded_weights = not_taken
    program = tpu.compiled(*tpu.step(options, mechanism, length, batch), options.chip)
    cost = program.cost_analysis()
    print(mechanism, length, batch, layers, cost["flops"], cost["bytes accessed"])
    return np.array([cost["flops"], cost["bytes accessed"]])


def work():
    """`{mechanism: tokens of a chip -> its (operations, bytes)}`."""
    one, four = counts("favorpp", BLOCK), counts("favorpp", BLOCK, 4)
    each = (four - one) / (3 * BLOCK)
    some = [counts("softmax", length) for length in SOFTMAX]
    parabola = np.polyfit(SOFTMAX, some, 2)
    return {
        "favorpp": lambda tokens: one + (tokens - BLOCK) * each,
        "softmax": lambda tokens: np.array([tokens**2, tokens, 1]) @ parabola,
    }


def exchanged(mechanism, chips):
    """Bytes that a chip receives in a step."""
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
