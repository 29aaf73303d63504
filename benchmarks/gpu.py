"""Check and time attention on an NVIDIA GPU, in at most 8 minutes for each backend.

    pip install ".[torch,hub]"        # PyTorch with CUDA, which brings Triton
    KERAS_BACKEND=torch python benchmarks/gpu.py --results gpu.jsonl
    pip install ".[hub]" "jax[cuda13]"
    KERAS_BACKEND=jax python benchmarks/gpu.py --results gpu.jsonl

The script first compares the kernels with all pairs of tokens. Then it times contenders
in turns, in bfloat16 with 12 heads of 64:

- triton on PyTorch, with the fastest of a few block sizes and numbers of warps,
- xla: the ordinary operations of PyTorch or JAX,
- softmax: `torch.nn.functional.scaled_dot_product_attention`, which selects cuDNN or
  FlashAttention, or `jax.nn.dot_product_attention` with cuDNN.

Then come whole models: MiniLM's shape forward, and training steps of GPT-2 small's.
Last comes the decoding of single tokens, by `benchmarks/decoding.py`. Times are medians
over turns. A row is left out when the time is up, and the last line says which.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--minutes", type=float, default=8)
parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--results", default="gpu.jsonl", help="output file")
parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")

if __name__ == "__main__":  # parse before the slow imports
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.widths, args.heads, args.rounds = [32], [16], 1, 1
        os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("KERAS_BACKEND", "torch")

import decoding
import keras
import numpy as np

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options

if keras.backend.backend() == "torch":
    import gpu_torch as device
elif keras.backend.backend() == "jax":
    import gpu_jax as device
else:
    raise SystemExit("Only PyTorch and JAX are timed: set KERAS_BACKEND.")


# Seconds in which to try sizes of blocks, for each width and kind of attention.
TUNING = 15


class Clock:
    """Writes rows to the results file until the time is up."""

    def __init__(self, args):
        self.args, self.end = args, time.time() + 60 * args.minutes
        self.left_out, self.has_kernels = [], True

    def has_time(self, name):
        if time.time() < self.end:
            return True
        self.left_out.append(name)
        return False

    def tell(self, **row):
        print(json.dumps(row), flush=True)
        with open(self.args.results, "a") as file:
            file.write(json.dumps(row) + "\n")


def in_turns(runs, rounds):
    """Returns the median time of each function in a dict, without those that fail."""
    for name, run in list(runs.items()):
        try:
            device.milliseconds(run), device.milliseconds(run)
        except Exception as error:
            print(f"{name} failed: {error!r:.300}", flush=True)
            del runs[name]
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(device.milliseconds(run))
    return {name: statistics.median(x) for name, x in times.items()}


def tokens(args, length):
    """Returns random queries, keys and values, float32."""
    generator = np.random.default_rng(0)
    shape = 3, 1, length, args.heads, 64
    return generator.normal(size=shape).astype("float32")


def linear(feature_map, causal, **options):
    """Returns linear attention as a function of queries, keys and values."""
    mask = AttentionMask(causal=causal, self_attention=True)
    options = Options(**options)
    return lambda *arrays: attend(*arrays, feature_map, mask, options=options)


def check(args, clock):
    """Compares the kernels with all pairs of tokens, forward and backward."""
    for causal in (False, True):
        feature_map = built(args, "favorpp", args.widths[0])
        found = {}
        for name, dtype in (("xla", device.WIDE), (device.KERNEL, device.NARROW)):
            arrays = device.arrays(tokens(args, 80), dtype)
            attention = linear(feature_map, causal, implementation=name)
            found[name] = [device.runs(attention, arrays, False)()]
            found[name] += device.runs(attention, arrays, True)()
        pairs = zip(found["xla"], found[device.KERNEL], strict=True)
        pairs = [[device.to_numpy(x) for x in pair] for pair in pairs]
        errors = [float(abs(a - b).max() / abs(a).max()) for a, b in pairs]
        errors = [round(x, 9) for x in errors]
        clock.tell(check=device.KERNEL, causal=causal, errors=errors)
        assert max(errors) < device.TOLERANCE, errors


def built(args, name, width):
    feature_map = feature_maps.get(name, num_features=width, seed=0)
    feature_map.build((None, None, args.heads, 64))
    return feature_map


def fastest(kernel, seconds):
    """Returns the fastest of the candidates that can be tried in some seconds."""
    end, times = time.time() + seconds, {}
    for sizes in device.CANDIDATES:
        times |= in_turns({sizes: kernel(sizes)}, 2)
        if time.time() > end and times:
            break
    return min(times, key=times.get, default=None)


def timed_kernel(feature_map, causal, arrays, backward, sizes):
    """Returns a function that runs the kernels with some sizes of their blocks."""
    attention = linear(feature_map, causal, implementation=device.KERNEL)
    return device.runs(attention, arrays, backward, causal, sizes)


def layers(args, clock):
    """Times attention alone."""
    cases = itertools.product(args.widths, (True, False), args.lengths, (False, True))
    best = {}
    for width, causal, length, backward in cases:
        name = f"width {width} causal {causal} {length} backward {backward}"
        if not clock.has_time(name):
            continue
        feature_map = built(args, "favorpp", width)
        arrays = device.arrays(tokens(args, length), "bfloat16")
        kernel = functools.partial(timed_kernel, feature_map, causal, arrays, backward)
        key = width, causal, backward
        if clock.has_kernels and key not in best:
            best[key] = fastest(kernel, 1 if args.smoke else TUNING)
        runs = {"softmax": device.runs(device.softmax(causal), arrays, backward)}
        if best.get(key) is not None:
            runs[device.KERNEL] = kernel(best[key])
        attention = linear(feature_map, causal, implementation="xla")
        runs["xla"] = device.runs(attention, arrays, backward)
        times = in_turns(runs, args.rounds)
        clock.tell(
            layer="favorpp", width=width, causal=causal, length=length,
            backward=backward, sizes=str(best.get(key)),
            ms={k: round(x, 3) for k, x in times.items()},
        )  # fmt: skip


def models(args, clock):
    """Times whole models of MiniLM's and GPT-2 small's shape."""
    import keras_hub

    cases = [
        ("bert", 8, 512, False), ("bert", 1, 8192, False), ("gpt2", 1, 8192, True),
        ("gpt2", 1, 32768, True),
    ]  # fmt: skip
    if args.smoke:
        cases = [("bert", 1, 32, False)]
    keras.config.set_dtype_policy("bfloat16")
    generator = np.random.default_rng(0)
    for name, batch, length, training in cases:
        if not clock.has_time(f"{name} {batch}x{length}"):
            continue
        runs = {}
        kernel = device.KERNEL if clock.has_kernels else "xla"
        for implementation in (None, kernel):
            kind = keras_hub.models.BertBackbone
            sizes = {"num_layers": 6, "hidden_dim": 384, "intermediate_dim": 1536}
            if name == "gpt2":
                kind = keras_hub.models.GPT2Backbone
                sizes = {"num_layers": 12, "hidden_dim": 768, "intermediate_dim": 3072}
            if args.smoke:
                sizes["num_layers"] = 1
            model = kind(
                vocabulary_size=1000, num_heads=12, max_sequence_length=length,
                dropout=0, **sizes,
            )  # fmt: skip
            if implementation:
                keras_rfattn.replace_attention(
                    model, "favorpp", num_features=args.widths[0], seed=0,
                    implementation=implementation,
                )  # fmt: skip
            ids = keras.ops.convert_to_tensor(
                generator.integers(1000, size=(batch, length)).astype("int32")
            )
            inputs = {"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)}
            if name == "bert":
                inputs["segment_ids"] = keras.ops.zeros_like(ids)
            run = device.runs_model(model, inputs, training)
            runs[implementation or "softmax"] = run
        times = in_turns(runs, max(1, args.rounds // 2))
        clock.tell(
            model=name, batch=batch, length=length, training=training,
            ms={k: round(x, 2) for k, x in times.items()},
        )  # fmt: skip


def steps(args, clock):
    """Times the decoding of single tokens."""
    if not clock.has_time("decoding"):
        return
    keras.config.set_dtype_policy("bfloat16")
    contexts = [64] if args.smoke else [1024, 8192, 65536]
    decoding.main(argparse.Namespace(
        contexts=contexts, model="gpt2", batch=[1], mechanisms=["favorpp"],
        num_features=args.widths[0], rounds=args.rounds, results=args.results,
        compile=not args.smoke,
    ))  # fmt: skip


def main(args):
    clock = Clock(args)
    clock.tell(date=time.strftime("%Y-%m-%d"), keras=keras.__version__, **device.NAMES)
    clock.has_kernels = device.KERNEL is not None
    if clock.has_kernels:
        check(args, clock)
    layers(args, clock)
    models(args, clock)
    steps(args, clock)
    clock.tell(left_out=clock.left_out)


if __name__ == "__main__":
    main(args)
