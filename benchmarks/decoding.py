"""Measure time and memory of one more token, after contexts of any length.

    python benchmarks/decoding.py [--contexts 512 1024 4096 16384 65536] [--batch 1 8]

A GPT-2 of one layer with 12 heads of 64 runs with softmax and its cache of keys and
values, and with each mechanism and its state. They take turns of some tokens each. The
benchmark prints milliseconds per token (median and minimum), bytes kept per sequence,
and the speed relative to softmax. The values in a cache do not change the time of
reading it, so softmax's cache is zeros and states have seen only 64 tokens.
"""

import argparse
import json
import os
import time

MECHANISMS = ("favorpp", "favorpp window 128", "hedgehog", "polysketch")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    contexts = [512, 1024, 4096, 16384, 65536]
    parser.add_argument("--contexts", nargs="+", type=int, default=contexts)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
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

HEADS, DIM, SEEN, BURST = 12, 64, 64, 6


def build(mechanism, longest, num_features):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=100, num_layers=1, num_heads=HEADS, hidden_dim=HEADS * DIM,
        intermediate_dim=DIM, dropout=0.0, max_sequence_length=longest + 1,
    )  # fmt: skip
    model = keras_hub.models.GPT2CausalLM(backbone)
    if mechanism != "softmax":
        name, *window = mechanism.split(" window ")
        takes_width = name not in ("hedgehog", "polysketch")
        keras_rfattn.replace_attention(
            model, name, num_features=num_features if takes_width else None, seed=0,
            window=int(window[0]) if window else None,
        )  # fmt: skip
    return model


def stepper(model, longest, batch):
    """Returns a compiled `step` that decodes one more token, and its first `state`."""

    def step(token, state, index):
        logits, _, state = model.call_with_cache(token, state, index)
        return logits, state

    if not isinstance(model, keras_rfattn.models.saving.Carrier):
        state = ops.zeros((batch, 1, 2, longest, HEADS, DIM))
    else:
        _, state = generation.prefill(model, np.ones((batch, SEEN), "int32"))
    if keras.backend.backend() == "jax":
        import jax

        # Donates the old state's memory to the new one, as a decoding loop does.
        return jax.jit(step, donate_argnums=1), state
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(step, jit_compile=True), state
    return step, state


def milliseconds(step, state, index, batch):
    """Returns the milliseconds of one token, and the state after it."""
    token = ops.ones((batch, 1), dtype="int32")
    index = ops.convert_to_tensor(index, dtype="int32")
    start = time.perf_counter()
    logits, state = step(token, state, index)
    ops.convert_to_numpy(logits)
    return 1000 * (time.perf_counter() - start), state


def size(state):
    """Returns the bytes of the state for one sequence."""
    leaves = keras.tree.flatten(state)
    return sum(ops.convert_to_numpy(x[:1]).nbytes for x in leaves)


def main(args):
    longest = max(args.contexts)
    names = ["softmax", *args.mechanisms]
    models = {name: build(name, longest, args.num_features) for name in names}
    for batch in args.batch:
        for context in args.contexts:
            steps = {k: stepper(m, context, batch) for k, m in models.items()}
            times = {name: [] for name in names}
            for _ in range(args.rounds):
                for name, (step, state) in steps.items():
                    # Decodes several tokens in a row, as generation does.
                    for i in range(-2, BURST):
                        found, state = milliseconds(step, state, context - 1, batch)
                        times[name] += [found] if i >= 0 else []
                    steps[name] = step, state
            softmax = float(np.median(times["softmax"]))
            for name, found in times.items():
                row = {
                    "backend": keras.backend.backend(), "batch": batch,
                    "context": context, "mechanism": name,
                    "ms": round(float(np.median(found)), 3),
                    "least": round(min(found), 3), "bytes": size(steps[name][1]),
                    "times as fast": round(softmax / float(np.median(found)), 2),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                with open(args.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
