"""Compare reading a prompt into a state with the parallel pass over the same tokens.

    python benchmarks/prefill.py [--tokens 8192] [--windows 0 128]

A GPT-2 of one layer with 12 heads of 64 runs `generation.prefill` and the model's own
call in turns, compiled as the backend does. The benchmark prints milliseconds (median)
and the share of the parallel pass's speed.
"""

import argparse
import json
import os
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--mechanism", default="favorpp")
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--results", default="prefill.jsonl", help="output file")
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


def build(args, window):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=100, num_layers=1, num_heads=12, hidden_dim=768,
        intermediate_dim=64, dropout=0.0, max_sequence_length=args.tokens,
    )  # fmt: skip
    model = keras_hub.models.GPT2CausalLM(backbone)
    return keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, seed=0,
        window=window or None,
    )  # fmt: skip


def parallel(model):
    """Returns the compiled call of the model."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.no_grad()(model)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(model)
    import jax

    call = jax.jit(lambda values, x: model.stateless_call(*values, x)[0])
    return lambda x: call(
        [
            [v.value for v in part]
            for part in (model.trainable_variables, model.non_trainable_variables)
        ],
        x,
    )


def milliseconds(run):
    start = time.perf_counter()
    ops.convert_to_numpy(run())
    return 1000 * (time.perf_counter() - start)


def main(args):
    tokens = np.ones((1, args.tokens), "int32")
    inputs = {k: ops.convert_to_tensor(tokens) for k in ("token_ids", "padding_mask")}
    for window in args.windows:
        model = build(args, window)
        call = parallel(model)
        runs = {
            "parallel": lambda call=call: call(inputs),
            "prefill": lambda model=model: generation.prefill(model, tokens)[0],
        }
        times = {name: [] for name in runs}
        for i in range(args.rounds + 2):
            for name, run in runs.items():
                found = milliseconds(run)
                times[name] += [found] if i > 1 else []
        found = {name: float(np.median(x)) for name, x in times.items()}
        row = {
            "backend": keras.backend.backend(), "tokens": args.tokens,
            "mechanism": args.mechanism, "window": window,
            **{name: round(x, 1) for name, x in found.items()},
            "share": round(found["parallel"] / found["prefill"], 3),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with open(args.results, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
