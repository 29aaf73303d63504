"""Measure time and memory of one more token, after contexts of any length.

    python benchmarks/decoding.py [--contexts 512 1024 4096 16384 65536] [--batch 1 8]

A GPT-2 of one layer with 12 heads of 64 (`--model gpt2`), or a Llama of the shape of
SmolLM2-135M (30 layers, 9 query heads and 3 key heads of 64; `--model smollm2`), runs
with softmax and its cache of keys and values, and with each mechanism and its state. A
mechanism "favorpp window 64 sliding sinks 4 softmax 8" keeps 8 layers softmax, spread
evenly, and "... heads 18" keeps 18 of all key heads softmax, always the same random
ones. They take turns of some tokens each. The benchmark prints milliseconds per token
(median and minimum), the bytes of the arrays that are kept per sequence, and both
relative to softmax: the times by the median of the turns' ratios, the bytes as a share.
No context is read: caches are random numbers, all of them visible, and sums and windows
have seen 256 tokens, after which a step does the same work as after any number. With
`--compile` PyTorch compiles the steps of linear models (`compiled_steps`). "cpu" is the
median of the processor's milliseconds, which other programs disturb less.
"""

import argparse
import contextlib
import itertools
import json
import os
import time

MECHANISMS = ("favorpp", "favorpp window 128", "hedgehog", "polysketch")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    contexts = [512, 1024, 4096, 16384, 65536]
    parser.add_argument("--contexts", nargs="+", type=int, default=contexts)
    parser.add_argument("--model", choices=("gpt2", "smollm2"), default="gpt2")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile on PyTorch")
    parser.add_argument("--results", default="decoding.jsonl")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np
from keras import ops

import keras_rfattn
from keras_rfattn import generation
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options
from keras_rfattn.ops.state import Exact

DIM, SEEN, BURST = 64, 256, 6
# Layers and key heads of the models.
SHAPES = {"gpt2": (1, 12), "smollm2": (30, 3)}


def softmax_model(name, longest):
    keras.utils.set_random_seed(0)
    if name == "gpt2":
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=100, num_layers=1, num_heads=12, hidden_dim=12 * DIM,
            intermediate_dim=DIM, dropout=0.0, max_sequence_length=longest + 1,
        )  # fmt: skip
        return keras_hub.models.GPT2CausalLM(backbone)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=49152, num_layers=30, num_query_heads=9, hidden_dim=9 * DIM,
        intermediate_dim=1536, num_key_value_heads=3, rope_max_wavelength=1e5,
        tie_word_embeddings=True,
    )  # fmt: skip
    return keras_hub.models.Llama3CausalLM(backbone)


def build(args, mechanism, longest):
    model = softmax_model(args.model, longest)
    if mechanism == "softmax":
        return model
    name, *words = mechanism.split()
    numbers = {k: int(n) for k, n in itertools.pairwise(words) if n.isdigit()}
    takes_width = name not in ("hedgehog", "polysketch")
    paths = [row.path for row in keras_rfattn.describe_attention(model).rows]
    options = {
        "window": numbers.get("window"), "sliding": "sliding" in words,
        "sinks": numbers.get("sinks", 0),
    }  # fmt: skip
    layers = np.linspace(0, len(paths) - 1, numbers.get("softmax", 0)).round()
    plan = {paths[int(i)]: None for i in layers}
    per_layer = SHAPES[args.model][1]
    heads = np.random.default_rng(0).permutation(len(paths) * per_layer)
    heads = sorted(heads[: numbers.get("heads", 0)].tolist())
    for path, group in itertools.groupby(heads, lambda i: paths[i // per_layer]):
        chosen = [i % per_layer for i in group]
        is_all = len(chosen) == per_layer
        plan[path] = None if is_all else Options(softmax_heads=chosen, **options)
    return keras_rfattn.replace_attention(
        model, Plan({**plan, "*": name}), seed=0, **options,
        num_features=args.num_features if takes_width else None,
    )  # fmt: skip


def stepper(args, model, longest, batch, stack):
    """Returns a compiled `step` that decodes one more token, and its first `state`."""

    def step(token, state, index):
        logits, _, state = model.call_with_cache(token, state, index)
        return logits, state

    is_linear = isinstance(model, keras_rfattn.models.saving.Carrier)
    if args.compile and is_linear:
        from keras_rfattn.experimental.compiled_step import compiled_steps

        stack.enter_context(compiled_steps(model))
    if not is_linear:
        layers, heads = SHAPES[args.model]
        state = random_like(ops.zeros((batch, layers, 2, longest, heads, DIM)))
    else:
        ids = np.ones((batch, min(SEEN, longest - 1)), "int32")
        _, state = generation.prefill(model, ids, max_length=longest)
        layers = {i: filled(x) for i, x in state.layers.items()}
        state = state._replace(layers=layers)
    if keras.backend.backend() == "jax":
        import jax

        # Donates the old state's memory to the new one, as a decoding loop does.
        return jax.jit(step, donate_argnums=1), state
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(step, jit_compile=True), state
    import torch

    return torch.no_grad()(step), state


def filled(kept):
    """Returns what a layer keeps, with random keys and values where all are kept."""
    if not isinstance(kept, tuple):
        return random_like(kept)
    if not kept.exact:
        return kept
    key, value, visible = kept.exact
    exact = Exact(random_like(key), random_like(value), ops.ones_like(visible))
    return kept._replace(exact=exact)


def random_like(x):
    return keras.random.normal(x.shape, dtype=x.dtype, seed=0)


def milliseconds(step, state, index, batch):
    """Returns the milliseconds of one token, the processor's too, and the state."""
    token = ops.ones((batch, 1), dtype="int32")
    index = ops.convert_to_tensor(index, dtype="int32")
    if isinstance(state, generation.Cache):
        # Every token is a new one, though all are at the same position.
        state = state._replace(seen=ops.zeros_like(state.seen))
    clocks = time.perf_counter, time.process_time
    starts = [clock() for clock in clocks]
    logits, state = step(token, state, index)
    ops.convert_to_numpy(logits)
    times = [clock() - start for clock, start in zip(clocks, starts, strict=True)]
    return 1000 * np.array(times), state


def size(state):
    """Returns the bytes of the state for one sequence."""
    leaves = keras.tree.flatten(state)
    return sum(ops.convert_to_numpy(x[:1]).nbytes for x in leaves)


def main(args):
    longest = max(args.contexts)
    names = ["softmax", *args.mechanisms]
    models = {name: build(args, name, longest) for name in names}
    with contextlib.ExitStack() as stack:
        measure(args, models, stack)


def measure(args, models, stack):
    names = list(models)
    for batch in args.batch:
        for context in args.contexts:
            steps = {
                k: stepper(args, m, context, batch, stack) for k, m in models.items()
            }
            times = {name: [] for name in names}
            for _ in range(args.rounds):
                for name, (step, state) in steps.items():
                    # Decodes several tokens in a row, as generation does.
                    turn = []
                    for _ in range(2 + BURST):
                        found, state = milliseconds(step, state, context - 1, batch)
                        turn.append(found)
                    times[name].append(turn[2:])
                    steps[name] = step, state
            # (rounds, tokens, clocks)
            times = {name: np.array(found) for name, found in times.items()}
            turns = {name: found[..., 0].mean(1) for name, found in times.items()}
            sizes = {name: size(state) for name, (_, state) in steps.items()}
            for name, found in times.items():
                median, cpu = np.median(found, axis=(0, 1)).tolist()
                ratio = np.median(turns["softmax"] / turns[name])
                row = {
                    "backend": keras.backend.backend(), "batch": batch,
                    **({} if args.model == "gpt2" else {"model": args.model}),
                    **({"compiled": name != "softmax"} if args.compile else {}),
                    "context": context, "mechanism": name,
                    "ms": round(median, 3), "cpu": round(cpu, 3),
                    "least": round(float(found[..., 0].min()), 3),
                    "times as fast": round(float(ratio), 2),
                    "bytes": sizes[name],
                    "share of bytes": round(sizes[name] / sizes["softmax"], 3),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                with open(args.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
