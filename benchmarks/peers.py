"""Compare linear attention with other PyTorch libraries, side by side in one run.

    KERAS_BACKEND=jax python benchmarks/peers.py [--causal] [--lengths 1024 4096 8192]

This library runs on the chosen backend, and computes its features too. The others run
on PyTorch in the same process: `scaled_dot_product_attention`, and FAVOR+ with as many
features from `performer-pytorch` and `pytorch-fast-transformers` (its C++), each if it
is installed, in float32. All get the same queries, keys and values, on the GPU if there
is one. They take turns, forward, and forward with backward. The benchmark prints the
minimum of milliseconds, and the median over turns of their time divided by ours, which
is our speed-up. `share of matmul` is the rate of the products that our attention needs
(features 4 H M, sums 2 M H, look-up 2 M H for a token and head, within causal blocks 2
C (M + H); backward twice that) divided by the rate of a product of two square matrices
(512 rows, 8192 on a GPU) of the same dtype in the same run.
"""

import argparse
import json
import os
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--mechanism", default="favorpp")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default="peers.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()
    if args.threads == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import torch
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ours(args, tokens):
    """Returns this library's `(forward, both)`, functions without arguments."""
    feature_map = feature_maps.get(
        args.mechanism, num_features=args.num_features, seed=0
    )
    feature_map.build((None, None, args.heads, args.head_dim))
    mask = AttentionMask(causal=args.causal, self_attention=True)

    def attention(*tokens):
        return attend(*tokens, feature_map, mask=mask)

    if keras.backend.backend() == "torch":
        return on_torch(attention, tokens, args.dtype)
    if keras.backend.backend() != "jax":
        raise ValueError("Runs on JAX and PyTorch. Received: KERAS_BACKEND=tensorflow")
    import jax

    tokens = [ops.convert_to_tensor(x, dtype=args.dtype) for x in tokens]
    forward = jax.jit(attention)
    both = jax.jit(
        jax.grad(lambda *x: ops.sum(ops.square(attention(*x))), argnums=(0, 1, 2))
    )
    return (
        lambda: jax.block_until_ready(forward(*tokens)),
        lambda: jax.block_until_ready(both(*tokens)),
    )


def on_torch(attention, tokens, dtype):
    """Returns `(forward, both)` for attention on PyTorch tensors `(B, T, N, H)`."""
    tokens = [torch.from_numpy(x).to(DEVICE, getattr(torch, dtype)) for x in tokens]

    def forward():
        with torch.no_grad():
            attention(*tokens)

    def both():
        x = [x.clone().requires_grad_() for x in tokens]
        attention(*x).square().sum().backward()

    return forward, both


def peers(args):
    """Returns the attention functions on `(B, T, N, H)` of all installed libraries."""
    found = {"torch SDPA": heads_first(
        lambda *x: torch.nn.functional.scaled_dot_product_attention(
            *x, is_causal=args.causal
        )
    )}  # fmt: skip
    if args.dtype != "float32":
        return found
    try:
        from performer_pytorch import FastAttention
    except ImportError:
        print("performer-pytorch is not installed")
    else:
        performer = FastAttention(args.head_dim, args.num_features, causal=args.causal)
        found["performer-pytorch"] = heads_first(performer.to(DEVICE))
    try:
        from fast_transformers.attention import CausalLinearAttention, LinearAttention
        from fast_transformers.feature_maps import Favor
        from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
    except ImportError:
        print("pytorch-fast-transformers is not installed")
    else:
        kind = CausalLinearAttention if args.causal else LinearAttention
        layer = kind(args.head_dim, Favor.factory(n_dims=args.num_features)).to(DEVICE)

        def fast(query, key, value):
            length = query.shape[1]
            mask = TriangularCausalMask if args.causal else FullMask
            lengths = LengthMask(torch.full((len(query),), length, device=DEVICE))
            return layer(
                query, key, value, mask(length, device=DEVICE), lengths, lengths
            )

        found["fast-transformers"] = fast
    return found


def heads_first(attention):
    def call(*tokens):
        return attention(*(x.transpose(1, 2) for x in tokens)).transpose(1, 2)

    return call


def seconds(run):
    """Returns the seconds of a run, including the work it queued on a GPU."""
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_rate(backend, dtype):
    """Returns the operations per second of a product of two matrices."""
    size, count = 512 if DEVICE == "cpu" else 8192, 20
    x = torch.randn(size, size, device=DEVICE, dtype=getattr(torch, dtype))
    run = lambda: x @ x  # noqa: E731
    if backend == "jax":
        import jax

        y = jax.random.normal(jax.random.key(0), x.shape, dtype)
        product = jax.jit(lambda x: x @ x)
        run = lambda: jax.block_until_ready(product(y))  # noqa: E731
    run()
    return 2 * size**3 / min(seconds(run) for _ in range(count))


def operations(args, length):
    h, m, c = args.head_dim, args.num_features, Options().block_length
    each = 8 * h * m + (2 * c * (m + h) if args.causal else 0)
    return each * length * args.heads * args.batch


def main(args):
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    backend, generator = keras.backend.backend(), np.random.default_rng(0)
    for length in args.lengths:
        shape = args.batch, length, args.heads, args.head_dim
        tokens = [generator.standard_normal(shape).astype("float32") for _ in range(3)]
        runs = {"ours": ours(args, tokens)}
        runs |= {
            name: on_torch(x, tokens, args.dtype) for name, x in peers(args).items()
        }
        rate = matmul_rate(backend, args.dtype)
        for i, direction in enumerate(("forward", "forward + backward")):
            times = {name: [] for name in runs}
            for _ in range(args.rounds + 1):
                for name, both in runs.items():
                    times[name].append(seconds(both[i]))
            # The first round compiles and does not count.
            times = {name: np.array(x[1:]) for name, x in times.items()}
            for name, found in times.items():
                row = {
                    "backend": backend, "causal": args.causal, "batch": args.batch,
                    "heads": args.heads, "head dim": args.head_dim,
                    "features": args.num_features, "threads": args.threads,
                    "dtype": args.dtype, "device": DEVICE,
                    "length": length, "direction": direction, "name": name,
                    "ms": round(1000 * found.min(), 2),
                    "ours times as fast": round(
                        float(np.median(found / times["ours"])), 2
                    ),
                }  # fmt: skip
                if name == "ours":
                    count = operations(args, length) * (1, 3)[i]
                    row["share of matmul"] = round(count / found.min() / rate, 2)
                print(json.dumps(row), flush=True)
                with open(args.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
