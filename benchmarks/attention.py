"""Compare linear attention with softmax attention, side by side in one run (JAX).

    python benchmarks/attention.py --causal --check

Every contender gets the same projected queries, keys and values `(B, T, N, H)` (batch,
tokens, heads, head size):

- linear: `keras_rfattn.layers.attend`, random features included.
- keras: the computation of `keras.layers.MultiHeadAttention` (dropout 0).
- jax: `jax.nn.dot_product_attention`.

Contenders take turns, so that other load on the machine affects all of them. Times are
the minimum, and ratios the median over turns. Softmax runs if its predicted memory
fits; otherwise the prediction is printed. An algorithm that disagrees with
`ops.quadratic` is not timed.
"""

import argparse
import operator
import os
import statistics
import sys
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--mechanism", default="favorpp")
    parser.add_argument("--causal", action="store_true", help="default: both")
    for name in ("--bidirectional", "--forward-only", "--padding", "--check"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import keras

from keras_rfattn import feature_maps, ops
from keras_rfattn.layers.linear_attention import attend
from keras_rfattn.ops.options import Options

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
BUDGET = 0.4 * MEMORY  # bytes that softmax may use
FORMULA = """peak: share of it that these FLOPs per token and head make: features of
q and k 4 H M, sums 2 M H, look-up 2 M H, the block itself, if causal, 2 C (M + H);
backward twice that. What is computed again in the backward pass does not count."""


class Problem:
    """Attention at one sequence length, as each contender computes it."""

    def __init__(self, args, length, heads=None, causal=True, gradient=True):
        self.shape = (args.batch, length, heads or args.heads, args.head_dim)
        self.causal, self.gradient, self.mask = causal, gradient, None
        if args.padding:
            mask = jnp.arange(length) < length - length // 16
            self.mask = jnp.broadcast_to(mask, (args.batch, length))
        width = args.num_features
        self.map = feature_maps.get(args.mechanism, num_features=width, seed=0)
        self.map.build(self.shape)

    def linear(self):
        mask = ops.AttentionMask(self.mask, causal=self.causal, self_attention=True)
        return lambda q, k, v: attend(q, k, v, self.map, mask=mask)

    def keras(self):
        batch, length, heads, dim = self.shape
        layer = keras.layers.MultiHeadAttention(heads, dim)
        layer.build((batch, length, heads * dim), (batch, length, heads * dim))
        mask = None if self.mask is None else self.mask[:, None]
        options = {"attention_mask": mask, "use_causal_mask": self.causal}
        return lambda q, k, v: layer._compute_attention(q, k, v, **options)[0]

    def jax(self):
        mask = None if self.mask is None else self.mask[:, None, None]
        options = {"mask": mask, "is_causal": self.causal}
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)

    def quadratic(self):
        side = self.map.default_scale(self.shape[-1]) ** 0.5

        def attention(q, k, v):
            bound = self.map.bind(q, k, side, self.mask, self.mask, self.causal)
            q, k = bound.query_features(q), bound.key_features(k)
            return ops.quadratic(q, k, v, self.mask, causal=self.causal)

        return attention

    def arrays(self):
        """Returns q, k, v and, for gradients, the factor on the output."""
        keys = jax.random.split(jax.random.key(0), 4 if self.gradient else 3)
        return [jax.random.normal(key, self.shape) for key in keys]

    def compile(self, contender):
        """Compiles a contender; returns it and the bytes XLA plans for temporaries."""
        program = function = getattr(self, contender)()
        if self.gradient:

            def loss(q, k, v, g):
                return jnp.vdot(function(q, k, v), g)

            program = jax.value_and_grad(loss, (0, 1, 2))
        array = jax.ShapeDtypeStruct(self.shape, "float32")
        program = jax.jit(program).lower(*[array] * (3 + self.gradient)).compile()
        return program, program.memory_analysis().temp_size_in_bytes

    def flops(self):
        h, m, c = self.shape[-1], self.map.output_dim, Options().block_length
        each = 8 * h * m + (2 * c * (m + h) if self.causal else 0)
        return each * self.shape[2] * (3 if self.gradient else 1)

    def scores(self):
        """Returns the bytes of one float32 matrix of attention scores."""
        batch, length, heads, _ = self.shape
        return batch * heads * length**2 * 4


def disagreement(args, causal):
    """Returns the relative error of linear attention, over outputs and gradients."""
    problem = Problem(args, 300, heads=2, causal=causal)
    *inputs, g = problem.arrays()
    results = []
    for function in (problem.linear(), problem.quadratic()):
        output, back = jax.vjp(function, *inputs)
        results.append((output, *back(g)))
    return max(
        float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(*results, strict=True)
    )


def score_matrices(args, contender, causal=True, gradient=True):
    """Returns planned memory in score matrices, equal at both lengths if quadratic."""
    problems = [Problem(args, n, None, causal, gradient) for n in (512, 1024)]
    return [p.compile(contender)[1] / p.scores() for p in problems]


def take_turns(programs, rounds):
    """Times each `(program, arrays)` in each round, after one warm-up round."""
    times = [[] for _ in programs]
    for turn in range(rounds + 1):
        for i, (program, arrays) in enumerate(programs):
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            if turn:
                times[i].append(time.perf_counter() - start)
    return times


def ratio(a, b):
    return statistics.median(map(operator.truediv, a, b))


def matmul_peak(size=2048):
    """Returns the FLOP/s of the fastest of some float32 matrix products."""
    x = jnp.ones((size, size))
    return 2 * size**3 / min(take_turns([(jax.jit(jnp.matmul), (x, x))], 10)[0])


def race(problem, contenders, rounds):
    programs, arrays = {c: problem.compile(c) for c in contenders}, problem.arrays()
    times = take_turns([(p, arrays) for p, _ in programs.values()], rounds)
    return programs, dict(zip(contenders, times, strict=True))


def print_table(args, causal, gradient, peak):
    print(f"\ncausal: {causal}, {'forward + backward' if gradient else 'forward'}")
    copies = {}
    for name in ("keras", "jax"):
        small, large = score_matrices(args, name, causal, gradient)
        copies[name] = max(small, large)
        print(f"{name} plans {small:.2f} B N T² floats at 512, {large:.2f} at 1024")
    head = "".join(f" | {name + ' µs':>9} {'MiB':>7} {'ratio':>6}" for name in copies)
    print(f"{'tokens':>7} {'µs/token':>9} {'MiB':>7} {'peak':>5}{head}")
    for length in args.lengths:
        problem = Problem(args, length, None, causal, gradient)
        predicted = {n: c * problem.scores() for n, c in copies.items()}
        fits = [n for n in copies if predicted[n] < BUDGET]
        programs, times = race(problem, ["linear", *fits], args.rounds)
        least = {n: min(t) / args.batch / length * 1e6 for n, t in times.items()}
        mib = {n: p[1] / 2**20 for n, p in programs.items()}
        share = problem.flops() / least["linear"] * 1e6 / peak
        line = f"{length:7} {least['linear']:9.1f} {mib['linear']:7.0f} {share:5.0%}"
        gains = {n: ratio(times[n], times["linear"]) for n in fits}
        for name in copies:
            if name in fits:
                line += f" | {least[name]:9.1f} {mib[name]:7.0f} {gains[name]:5.1f}x"
            else:
                line += f" | {'too large':>9} {predicted[name] / 2**20:7.0f} {'':6}"
        slower = any(x < 1 for x in gains.values())
        print(line + " slower than softmax here" * slower, flush=True)


def check(args):
    """Prints the promised numbers; returns whether all of them hold."""
    print("\nchecks: causal, forward + backward")
    passed, goals = [], [(8192, 6, "keras", 10), (2048, 12, "jax", 2.5)]
    for length, heads, other, least in goals:
        problem, gain = Problem(args, length, heads), 0  # 0 if softmax does not fit
        need = max(score_matrices(args, other)) * problem.scores()
        if need < BUDGET:
            times = race(problem, ["linear", other], args.rounds)[1]
            gain = ratio(times[other], times["linear"])
        passed.append(gain >= least)
        text = f"{length} tokens, {heads} heads, {other} / linear: {gain:.1f} > {least}"
        print("  pass" if passed[-1] else "  FAIL", text, flush=True)
    problems = [Problem(args, length, 12) for length in (2048, 16384)]
    runs = [(p.compile("linear")[0], p.arrays()) for p in problems]
    short, long = take_turns(runs, args.rounds)
    growth = ratio(long, short) / 8
    passed.append(growth <= 1.3)
    text = f"12 heads, time per token, 16384 / 2048: {growth:.2f} < 1.3"
    print("  pass" if passed[-1] else "  FAIL", text)
    return all(passed)


def main(args):
    peak = matmul_peak()
    print(
        f"{args.mechanism}, {args.num_features} features, {args.batch} x {args.heads} "
        f"heads of {args.head_dim}, float32, {jax.devices()[0].device_kind}\n"
        f"matmul peak {peak / 1e9:.0f} GFLOP/s, memory {MEMORY / 2**30:.0f} GiB\n"
        + FORMULA
    )
    both, correct = args.causal == args.bidirectional, True
    for causal in (True, False) if both else (args.causal,):
        error = disagreement(args, causal)
        if not error < 1e-4:
            print(f"causal={causal}: off by {error:.1e} from its definition, not timed")
            correct = False
            continue
        for gradient in (False,) if args.forward_only else (False, True):
            print_table(args, causal, gradient, peak)
    sys.exit(0 if correct and (not args.check or check(args)) else 1)


if __name__ == "__main__":
    main(args)
