"""Check and time attention on an NVIDIA GPU with PyTorch, in at most 8 minutes.

    pip install ".[torch,hub]"        # PyTorch with CUDA, which brings Triton
    python benchmarks/gpu.py --results gpu.jsonl

The script first compares the Triton kernels with all pairs of tokens in float64. Then
it times contenders in turns, in bfloat16 with 12 heads of 64:

- triton, with the fastest of a few block sizes and numbers of warps,
- xla: the ordinary operations of PyTorch,
- sdpa: `torch.nn.functional.scaled_dot_product_attention`, which selects cuDNN or
  FlashAttention.

Last come whole models: MiniLM's shape forward, and training steps of GPT-2 small's.
Times are medians over turns. A row is left out when the time is up, and the last line
says which.
"""

import argparse
import itertools
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--minutes", type=float, default=8)
parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--results", default="gpu.jsonl", help="output file")
parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")

if __name__ == "__main__":  # parse before the slow imports
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.widths, args.heads, args.rounds = [32], [16], 1, 1
        os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.fused.triton import attention as kernels
from keras_rfattn.fused.triton.plan import Sizes
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANDIDATES = [
    Sizes(tokens=tokens, features=features, blocks=blocks, warps=warps)
    for tokens, features, blocks, warps in itertools.product(
        (32, 64, 128), (64, 128), (4, 8, 16), (4, 8)
    )
]


class Clock:
    """Writes rows to the results file until the time is up."""

    def __init__(self, args):
        self.args, self.end = args, time.time() + 60 * args.minutes
        self.left_out = []

    def has_time(self, name):
        if time.time() < self.end:
            return True
        self.left_out.append(name)
        return False

    def tell(self, **row):
        print(json.dumps(row), flush=True)
        with open(self.args.results, "a") as file:
            file.write(json.dumps(row) + "\n")


def milliseconds(run):
    """Returns the time of one call."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def in_turns(runs, rounds):
    """Returns the median time of each function in a dict; `None` if it fails."""
    for name, run in list(runs.items()):
        try:
            run(), run()
        except Exception as error:
            print(f"{name} failed: {error!r:.300}", flush=True)
            del runs[name]
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
    return {name: statistics.median(x) for name, x in times.items()}


def tokens(args, length, dtype, batch=1):
    generator = torch.Generator().manual_seed(0)
    shape = 3, batch, length, args.heads, 64
    query, key, value = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return [x.requires_grad_() for x in (query, key, value)]


def contender(feature_map, causal, arrays, backward, sizes=None, **options):
    """Returns a function that runs attention, with gradients if `backward`."""
    mask = AttentionMask(causal=causal, self_attention=True)
    options = Options(**options)

    def run():
        if sizes is not None:
            kernels.SIZES[causal] = sizes
        output = attend(*arrays, feature_map, mask, options=options)
        return torch.autograd.grad(output.sum(), arrays) if backward else output

    return with_gradient(run, backward)


def with_gradient(run, backward):
    def runs():
        with torch.set_grad_enabled(backward):
            return run()

    return runs


def sdpa(causal, arrays, backward):
    """Returns a function that runs PyTorch's softmax attention."""

    def run():
        heads_first = [x.transpose(1, 2) for x in arrays]
        attention = torch.nn.functional.scaled_dot_product_attention
        output = attention(*heads_first, is_causal=causal)
        return torch.autograd.grad(output.sum(), arrays) if backward else output

    return with_gradient(run, backward)


def check(args, clock):
    """Compares the kernels with float64, forward and backward."""
    for causal, window in itertools.product((False, True), (None, 16)):
        feature_map = built(args, "favorpp", args.widths[0])
        arrays = tokens(args, 80, torch.float32)
        near = {} if window is None else {"window": window, "sliding": True, "sinks": 4}
        found = {}
        for name, dtype in (("xla", torch.float64), ("triton", torch.float32)):
            same = [x.detach().to(dtype).requires_grad_() for x in arrays]
            run = contender(
                feature_map, causal, same, False, implementation=name, **near
            )
            slopes = contender(
                feature_map, causal, same, True, implementation=name, **near
            )
            found[name] = [run(), *slopes()]
        errors = [
            float((a - b).abs().max() / a.abs().max())
            for a, b in zip(found["xla"], found["triton"], strict=True)
        ]
        errors = [round(x, 9) for x in errors]
        clock.tell(check="triton", causal=causal, window=window, errors=errors)
        assert max(errors) < 1e-4, errors


def built(args, name, width):
    feature_map = feature_maps.get(name, num_features=width, seed=0)
    feature_map.build((None, None, args.heads, 64))
    return feature_map


def layers(args, clock):
    """Times attention alone."""
    cases = itertools.product(
        args.widths, (True, False), args.lengths, (False, True), (None, 64)
    )
    best = {}
    for width, causal, length, backward, window in cases:
        name = f"width {width} causal {causal} {length} backward {backward} {window}"
        if not clock.has_time(name):
            continue
        feature_map = built(args, "favorpp", width)
        arrays = tokens(args, length, torch.bfloat16)
        near = {} if window is None else {"window": window, "sliding": True, "sinks": 4}
        near["implementation"] = "triton"
        key = width, causal, backward, window
        if key not in best:
            runs = {
                sizes: contender(feature_map, causal, arrays, backward, sizes, **near)
                for sizes in CANDIDATES[:: 17 if args.smoke else 1]
                if sizes.features <= max(width, 64)
            }
            found = in_turns(runs, 2)
            best[key] = min(found, key=found.get)
        sizes = best[key]
        runs = {
            "triton": contender(feature_map, causal, arrays, backward, sizes, **near),
            "sdpa": sdpa(causal, arrays, backward),
        }
        if window is None:
            runs["xla"] = contender(
                feature_map, causal, arrays, backward, implementation="xla"
            )
        times = in_turns(runs, args.rounds)
        clock.tell(
            layer="favorpp", width=width, causal=causal, length=length,
            backward=backward, window=window, sizes=sizes._asdict(),
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
    for name, batch, length, training in cases:
        if not clock.has_time(f"{name} {batch}x{length}"):
            continue
        runs = {}
        for implementation in (None, "triton"):
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
            ids = torch.randint(1000, (batch, length), device=DEVICE)
            inputs = {"token_ids": ids, "padding_mask": torch.ones_like(ids)}
            if name == "bert":
                inputs["segment_ids"] = torch.zeros_like(ids)
            weights = [v.value for v in model.trainable_variables]

            def run(model=model, inputs=inputs, weights=weights, training=training):
                with torch.set_grad_enabled(training):
                    outputs = keras.tree.flatten(model(inputs))
                    loss = sum(x.float().square().mean() for x in outputs)
                    if training:
                        torch.autograd.grad(loss, weights, allow_unused=True)

            runs[implementation or "softmax"] = run
        times = in_turns(runs, max(1, args.rounds // 2))
        clock.tell(
            model=name, batch=batch, length=length, training=training,
            ms={k: round(x, 2) for k, x in times.items()},
        )  # fmt: skip


def main(args):
    clock = Clock(args)
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, interpreted"
    versions = {"torch": torch.__version__, "keras": keras.__version__}
    clock.tell(card=card, date=time.strftime("%Y-%m-%d"), **versions)
    check(args, clock)
    layers(args, clock)
    models(args, clock)
    clock.tell(left_out=clock.left_out)


if __name__ == "__main__":
    main(args)
