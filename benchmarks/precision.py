"""Measure whether generation in low precision drifts from a float32 state.

    python benchmarks/precision.py --data-dir DIR [--tokens 10000] [--window 32]

A small Llama with linear attention learns bytes of wikitext2/valid.txt in DIR (a minute
or two). Then the same weights generate under float32, mixed_bfloat16 and mixed_float16:
float32 samples the tokens, and all three receive them. For each fifth of the sequence,
the benchmark prints how often the top token equals float32's, and the median of the
largest difference of logits, relative to their spread.
"""

import argparse
import json
import os
import pathlib


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--mechanism", default="favorplus")
    parser.add_argument("--window", type=int)
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--results", default="precision.jsonl", help="output file")
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

LENGTH, BATCH, PROMPT = 256, 8, 64


def build(args, dtype):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=256, num_layers=2, num_query_heads=4, num_key_value_heads=2,
        hidden_dim=128, intermediate_dim=256, dtype=dtype,
    )  # fmt: skip
    return keras_rfattn.replace_attention(
        keras_hub.models.LlamaCausalLM(backbone), args.mechanism, num_features=64,
        seed=0, window=args.window,
    )  # fmt: skip


def train(args, model, text):
    starts = np.random.default_rng(0).integers(
        len(text) - LENGTH, size=args.steps * BATCH
    )
    rows = np.stack([text[i : i + LENGTH + 1] for i in starts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, weighted_metrics=[])
    x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, 1:])}
    model.fit(x, rows[:, 1:], batch_size=BATCH, verbose=2)


def last(logits):
    return ops.convert_to_numpy(ops.cast(logits[0, -1], "float32"))


def main(args):
    folder = pathlib.Path(args.data_dir, "wikitext2")
    text, prompt = (
        np.frombuffer((folder / f"{part}.txt").read_bytes(), "uint8").astype("int32")
        for part in ("valid", "test")
    )
    models = {"float32": build(args, "float32")}
    train(args, models["float32"], text)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        models[policy] = build(args, policy)
        models[policy].set_weights(models["float32"].get_weights())

    found = {k: generation.prefill(m, prompt[None, :PROMPT]) for k, m in models.items()}
    same, errors = ({k: [] for k in models} for _ in range(2))
    generator = np.random.default_rng(0)
    for _ in range(args.tokens):
        logits = {k: last(x) for k, (x, _) in found.items()}
        wanted = logits["float32"]
        for policy, x in logits.items():
            same[policy].append(x.argmax() == wanted.argmax())
            errors[policy].append(np.abs(x - wanted).max() / np.ptp(wanted))
        weights = np.exp(wanted.astype("float64") - wanted.max())
        token = generator.choice(256, p=weights / weights.sum())
        token = np.array([[token]], "int32")
        found = {k: generation.step(m, token, found[k][1]) for k, m in models.items()}
    for policy in list(models)[1:]:
        row = {
            "backend": keras.backend.backend(), "policy": policy,
            "mechanism": args.mechanism, "window": args.window, "tokens": args.tokens,
            "same": round(float(np.mean(same[policy])), 4),
            "same by fifths": [
                round(float(x.mean()), 4) for x in np.array_split(same[policy], 5)
            ],
            "error by fifths": [
                round(float(np.median(x)), 6) for x in np.array_split(errors[policy], 5)
            ],
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with open(args.results, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
