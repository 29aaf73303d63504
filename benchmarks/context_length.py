"""Measure tokens per second of a training step against context length (JAX).

PolySketchFormer (Kacham et al., 2024), table 4 and figure 4: the number of tokens in a
batch is fixed, so that a mechanism of linear cost is equally fast at any length.

    python benchmarks/context_length.py [--plot out.png]

The model is a Transformer++ of `--layers` blocks, and a step is forward, backward and
Adam. Mechanisms take turns; times are the minimum, and ratios the median. Memory is
what XLA plans for temporaries. Softmax does not run if it would need more than 40 % of
the machine's memory (predicted from two short lengths). `slope` is the time per token
at the longest length divided by that at 1024.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

MECHANISMS = {
    "softmax": ("softmax", {}),
    "polynomial": ("polynomial", {}),
    "polysketch_learned + local": (
        "polysketch_learned",
        {"num_features": 16, "window": 256},
    ),
    "polysketch": ("polysketch", {"num_features": 16}),
    "favorplus": ("favorplus", {"num_features": 256}),
    "favorpp": ("favorpp", {"num_features": 256}),
    "favorpp + local": ("favorpp", {"num_features": 256, "window": 256}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per batch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot")
    args = parser.parse_args()
    unknown = set(args.mechanisms) - set(MECHANISMS)
    if unknown:
        parser.error(f"unknown {sorted(unknown)}; one of {list(MECHANISMS)}")
    return args


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "recipes"))

from common.transformer_pp import transformer_pp

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
BUDGET = 0.4 * MEMORY
VOCABULARY = 1000
QUADRATIC = ("softmax", "polynomial")


class Step:
    """One training step of a mechanism at one length."""

    def __init__(self, name, length, args):
        self.batch = max(1, args.tokens // length)
        self.tokens = self.batch * length
        attention, options = MECHANISMS[name]
        options = options if attention == "softmax" else {**options, "seed": 0}
        model = transformer_pp(
            attention=attention, vocabulary_size=VOCABULARY, num_layers=args.layers,
            num_heads=args.heads, head_dim=args.head_dim, **options,
        )  # fmt: skip
        optimizer = keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
        fixed = [v.value for v in model.non_trainable_variables]

        def loss(weights, tokens):
            logits, _ = model.stateless_call(weights, fixed, tokens[:, :-1])
            logs = jax.nn.log_softmax(logits)
            picked = jax.numpy.take_along_axis(logs, tokens[:, 1:, None], -1)
            return -jax.numpy.mean(picked)

        def step(weights, state, tokens):
            gradients = jax.grad(loss)(weights, tokens)
            return optimizer.stateless_apply(state, gradients, weights)

        generator = np.random.default_rng(0)
        tokens = generator.integers(0, VOCABULARY, (self.batch, length + 1))
        self.arguments = (
            [v.value for v in model.trainable_variables],
            [v.value for v in optimizer.variables],
            tokens.astype("int32"),
        )
        self.program = jax.jit(step).lower(*self.arguments).compile()
        self.bytes = self.program.memory_analysis().temp_size_in_bytes

    def seconds(self):
        start = time.perf_counter()
        jax.block_until_ready(self.program(*self.arguments))
        return time.perf_counter() - start


def main(args):
    print(
        f"{args.layers} layers, {args.heads} heads of {args.head_dim}, {args.tokens} "
        f"tokens a batch (or one sequence), {jax.devices()[0].device_kind}, memory "
        f"{MEMORY / 2**30:.0f} GiB"
    )
    per_token = {name: {} for name in args.mechanisms}
    print(f"{'tokens':>7} {'mechanism':28} {'tokens/s':>9} {'MiB':>7} {'softmax/':>9}")
    for length in args.lengths:
        steps = {}
        for name in args.mechanisms:
            need = predicted(name, length, args) if name in QUADRATIC else 0
            if need < BUDGET:
                steps[name] = Step(name, length, args)
            else:
                text = f"{'too large':>9} {need / 2**20:7.0f} predicted"
                print(f"{length:7} {name:28} {text}")
        times = {name: [] for name in steps}
        for turn in range(args.rounds + 1):
            for name, step in steps.items():
                seconds = step.seconds()
                if turn:
                    times[name].append(seconds / step.tokens)
        for name, step in steps.items():
            per_token[name][length] = min(times[name])
            gain = ""
            if "softmax" in times:
                pairs = zip(times["softmax"], times[name], strict=True)
                gain = f"{statistics.median(a / b for a, b in pairs):8.2f}x"
            print(
                f"{length:7} {name:28} {1 / per_token[name][length]:9.0f} "
                f"{step.bytes / 2**20:7.0f} {gain}",
                flush=True,
            )
    summarize(per_token, args)
    if args.plot:
        plot(per_token, args.plot)


def predicted(name, length, args):
    """Predicts the bytes at `length` from two short lengths with as many tokens."""
    small, large = (Step(name, n, args).bytes for n in (256, 512))
    slope = (large - small) / 256
    tokens = max(args.tokens, length)
    return (small + slope * (length - 256)) * tokens / args.tokens


def summarize(per_token, args):
    softmax = per_token.get("softmax", {})
    for name, times in per_token.items():
        base = times.get(1024)
        if base and max(times) > 1024:
            longest = max(times)
            text = f"{longest} / 1024 time per token {times[longest] / base:.2f}"
            faster = [n for n in times if n in softmax and times[n] < softmax[n]]
            if name != "softmax" and softmax:
                at = f"from {min(faster)} tokens" if faster else "nowhere"
                text += f"; faster than softmax {at}"
            print(f"{name:28} {text}")


def plot(per_token, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, times in per_token.items():
        plt.loglog(list(times), [t * 1e6 for t in times.values()], "o-", label=name)
    plt.xlabel("context length (tokens)")
    plt.ylabel("training time per token (µs)")
    plt.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=120)


if __name__ == "__main__":
    main(args)
