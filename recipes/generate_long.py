"""Generate after a prompt of 32,768 tokens, with a state that does not grow.

The recipe compares GPT-2 made linear with GPT-2 with softmax and its cache of keys and
values. It measures the memory that a sequence keeps, and the time for one more token,
at every context on the way.

    python recipes/generate_long.py --data-dir DIR
    python recipes/generate_long.py --data-dir DIR --preset FOLDER --window 128

DIR holds wikitext2/test.txt (docs/pages/guides/uptraining.md). Without a preset,
weights are random and tokens are bytes, which changes neither time nor memory. With a
preset, positions beyond the checkpoint's repeat the checkpoint's own
(`extend_positions`), and the generated text is as good as the map allows (uptrain it
first).

Softmax is measured up to `--softmax-tokens`, with caches of that size. Beyond that, its
time is predicted by a line through these measurements (`a + b · tokens`), and its
memory by its formula, 2 · layers · tokens · hidden dim numbers. The linear model reads
the prompt in chunks, and only one chunk at a time needs memory.

Cost: some minutes on two cores. Expected (docs/pages/lab/generation.md): the state
has a constant size and a token a constant cost, while the cache and the time of softmax
grow linearly.
"""

import json
import pathlib
import time

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp", num_features=256, seed=0,
    chunk=2048, softmax_tokens=[512, 1024, 2048, 4096], results="generate_long.jsonl",
    plot="generate_long.png",
)  # fmt: skip
parser.add_argument("--preset", help="KerasHub GPT-2 preset")
parser.add_argument("--window", type=int)
parser.add_argument("--layers", type=int, default=12, help="without a preset")
parser.add_argument("--prompt", type=int, default=32768, help="tokens")
parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
args = parse(
    parser, layers=1, prompt=64, tokens=16, chunk=32, softmax_tokens=[16, 32],
    num_features=8,
)  # fmt: skip

import keras
import keras_hub
import numpy as np
from common.results import record
from keras import ops

import keras_rfattn
from keras_rfattn import generation
from keras_rfattn.backend.layers import compiled_for_inference

MEGA = 2**20


def main(args):
    length = args.prompt + args.tokens
    model, tokens = load(args, length)
    softmax = [softmax_row(args, model, n) for n in sorted(args.softmax_tokens)]
    if args.preset:
        model.backbone = keras_rfattn.extend_positions(
            model.backbone, length, method="tile"
        )
    keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, window=args.window,
        seed=args.seed,
    )  # fmt: skip
    linear = generated(args, model, tokens)
    slope, start = np.polyfit(
        [x["tokens"] for x in softmax], [x["ms"] for x in softmax], 1
    )
    last = linear[-1]
    predicted = {
        "mechanism": "softmax, predicted",
        "tokens": last["tokens"],
        "ms": start + slope * last["tokens"],
        "MiB": softmax[-1]["MiB"] * last["tokens"] / softmax[-1]["tokens"],
    }
    write(args, predicted)
    print(
        f"at {last['tokens']} tokens: state {last['MiB']:.1f} MiB of "
        f"{predicted['MiB']:.1f} predicted for softmax, a token {last['ms']:.1f} ms of "
        f"{predicted['ms']:.1f}"
    )
    draw(args, softmax, linear, predicted)


def load(args, length):
    """Returns a softmax GPT-2 and the tokens of a long text."""
    text = (args.data_dir / "wikitext2" / "test.txt").read_bytes()
    keras.utils.set_random_seed(args.seed)
    if args.preset:
        model = keras_hub.models.CausalLM.from_preset(args.preset)
        tokens = model.preprocessor.tokenizer(text.decode()[: 12 * args.prompt])
    else:
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=256, num_layers=args.layers, num_heads=12, hidden_dim=768,
            intermediate_dim=3072, max_sequence_length=length,
        )  # fmt: skip
        model, tokens = keras_hub.models.GPT2CausalLM(backbone), list(text)
    tokens = np.resize(np.asarray(tokens, "int32"), args.prompt)[None]
    return model, tokens


def generated(args, model, tokens):
    """Reads the prompt in chunks, then generates; returns a row of results for each."""
    state, rows = None, []
    for i in range(0, args.prompt, args.chunk):
        begun, part = time.perf_counter(), tokens[:, i : i + args.chunk]
        if state is None:
            logits, state = generation.prefill(model, part)
        else:
            logits, state = generation.step(model, part, state)
        logits = ops.convert_to_numpy(logits[:, -1])
        seen, took = i + part.shape[1], time.perf_counter() - begun
        # Times one more token from here; the state of the prompt stays as it is.
        now = logits.argmax(-1)[:, None]
        rows.append(row(args, args.mechanism, seen, lambda s=state, x=now: (
            generation.step(model, x, s)), state))  # fmt: skip
        print(f"prompt: {seen} of {args.prompt} tokens, {took:.1f} s for this chunk")
        write(args, rows[-1])
    for i in range(args.tokens):
        begun = time.perf_counter()
        logits, state = generation.step(model, now, state)
        now = ops.convert_to_numpy(logits[:, -1]).argmax(-1)[:, None]
        took = 1000 * (time.perf_counter() - begun)
        if i % 16 == 15 or i == args.tokens - 1:
            print(f"generated: {i + 1} tokens, the last in {took:.1f} ms")
    last = {**rows[-1], "tokens": args.prompt + args.tokens, "ms": took}
    write(args, last)
    return [*rows, last]


def row(args, mechanism, tokens, step, state):
    """Returns the memory that a sequence keeps, and the median time of a token."""
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        logits, _ = step()
        ops.convert_to_numpy(logits)
        times.append(1000 * (time.perf_counter() - begun))
    leaves = keras.tree.flatten(state)
    size = sum(ops.convert_to_numpy(x).nbytes for x in leaves) / MEGA
    # The first run compiles and does not count.
    return {"mechanism": mechanism, "tokens": tokens, "MiB": size,
            "ms": float(np.median(times[1:]))}  # fmt: skip


def softmax_row(args, model, tokens):
    """Times a token with KerasHub's cache, whose zeros do not change the time."""
    config = model.backbone.get_config()
    heads, dim = config["num_heads"], config["hidden_dim"]
    shape = (1, config["num_layers"], 2, tokens, heads, dim // heads)
    cache, token = ops.zeros(shape), ops.ones((1, 1), dtype="int32")

    def forward(token, cache, index):
        logits, _, cache = model.call_with_cache(token, cache, index)
        return logits, cache

    # The linear model is compiled in the same way.
    call = compiled_for_inference(forward, model)
    index = ops.cast(tokens - 1, "int32")
    found = row(args, "softmax", tokens, lambda: call(token, cache, index), cache)
    write(args, found)
    return found


def write(args, row):
    row = {"window": args.window, **row}
    print(json.dumps(row), flush=True)
    record(args, row)


def draw(args, softmax, linear, predicted):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("ms", "MiB"), ("ms a token", "MiB kept"), strict=True
    ):
        for rows, name, style in (
            (linear, args.mechanism, "o-"), (softmax, "softmax", "s-"),
            ([softmax[-1], predicted], "softmax, predicted", "s:"),
        ):  # fmt: skip
            axes.plot([x["tokens"] for x in rows], [x[key] for x in rows], style,
                      label=name, markersize=3)  # fmt: skip
        axes.set(xlabel="tokens seen", ylabel=label, yscale="log", xscale="log")
        axes.legend()
    figure.savefig(args.plot, dpi=120)
    print(f"plot: {args.plot}")


if __name__ == "__main__":
    main(args)
