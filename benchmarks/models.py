"""Compare whole models with linear attention and with softmax, side by side in one run.

    python benchmarks/models.py [--models bert gpt2 vit] [--training]

The models have the shapes of MiniLM, GPT-2 small and ViT base, and random weights,
which do not change times. Each runs with its checkpoint's own softmax and with every
mechanism. They take turns, so that other load on the machine affects all of them. The
benchmark prints the median of milliseconds, and the median over turns of softmax's time
divided by the mechanism's, which is the speed-up. With `--training` it times a step of
SGD on all weights. "nothing" has all projections and adds queries, keys and values: no
attention can be faster. KerasHub's presets have a dropout of 0.1, and with that Keras
does not use PyTorch's fused softmax, even in inference; `--dropout 0.1` measures this
case. A mechanism "favorpp 64 heads 3" keeps softmax in three heads of the third layer.
"""

import argparse
import json
import os
import time

SHAPES = {"bert": ("8x64", "8x128", "2x512", "1x2048"), "gpt2": ("1x512", "1x2048"),
          "vit": ("2x197",)}  # fmt: skip
MECHANISMS = ("nothing", "favorpp 256", "favorpp 64", "favorpp 256 window 128",
              "favorpp 64 window 64", "elu")  # fmt: skip


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="batch x tokens")
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0, help="BERT, GPT-2 only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default="models.jsonl", help="output file")
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
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options


def softmax_model(name, length, dropout):
    keras.utils.set_random_seed(0)
    models = keras_hub.models
    if name == "vit":
        side = 16 * round((length - 1) ** 0.5)
        return models.ViTBackbone(
            image_shape=(side, side, 3), patch_size=16, num_layers=12, num_heads=12,
            hidden_dim=768, mlp_dim=3072,
        )  # fmt: skip
    sizes = (6, 384) if name == "bert" else (12, 768)
    cls = models.BertBackbone if name == "bert" else models.GPT2Backbone
    return cls(
        vocabulary_size=1000, num_layers=sizes[0], num_heads=12, hidden_dim=sizes[1],
        intermediate_dim=4 * sizes[1], dropout=dropout, max_sequence_length=length,
    )  # fmt: skip


def build(name, mechanism, length, dropout):
    model = softmax_model(name, length, dropout)
    if mechanism == "nothing":
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.MultiHeadAttention):
                layer._compute_attention = nothing
    elif mechanism != "softmax":
        # The text is a name, a width, a window, then softmax heads of the third layer.
        mechanism, _, heads = mechanism.partition(" heads ")
        kind, *numbers = mechanism.replace("window", "").split()
        numbers = [int(x) for x in numbers] + [None, None]
        third = keras_rfattn.describe_attention(model).rows[2].path
        kept = Options(window=numbers[1], softmax_heads=range(int(heads or 0)))
        keras_rfattn.replace_attention(
            model, Plan({third: kept, "*": kind}), num_features=numbers[0],
            window=numbers[1], seed=0,
        )  # fmt: skip
    return model


def nothing(query, key, value, *args, **kwargs):
    """Replaces attention by a sum, which is a lower bound on its time."""
    return query + key + value, None


def inputs(name, batch, length):
    generator = np.random.default_rng(0)
    if name == "vit":
        side = 16 * round((length - 1) ** 0.5)
        return generator.uniform(size=(batch, side, side, 3)).astype("float32")
    tokens = generator.integers(1000, size=(batch, length)).astype("int32")
    found = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return {**found, "segment_ids": 0 * tokens} if name == "bert" else found


def timed(model, x, training):
    """Returns a function that runs the model once, compiled as Keras does."""
    if not training:
        model.compile()
        return lambda: model.predict_on_batch(x)
    outputs = [ops.mean(ops.square(y)) for y in keras.tree.flatten(model(model.input))]
    trainer = keras.Model(model.input, sum(outputs))
    trainer.compile("sgd", loss=lambda _, y: ops.mean(y))
    return lambda: trainer.train_on_batch(x, np.zeros(1, "float32"))


def milliseconds(run):
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def main(args):
    for name in args.models:
        for shape in args.shapes or SHAPES[name]:
            batch, length = map(int, shape.split("x"))
            x = inputs(name, batch, length)
            runs = {
                mechanism: timed(
                    build(name, mechanism, length, args.dropout), x, args.training
                )
                for mechanism in ("softmax", *args.mechanisms)
            }
            for run in runs.values():
                run(), run()
            times = {mechanism: [] for mechanism in runs}
            for _ in range(args.rounds):
                for mechanism, run in runs.items():
                    times[mechanism].append(min(milliseconds(run) for _ in range(2)))
            for mechanism, found in times.items():
                ratios = np.array(times["softmax"]) / found
                row = {
                    "backend": keras.backend.backend(), "model": name,
                    "shape": shape, "training": args.training, "dropout": args.dropout,
                    "mechanism": mechanism, "ms": round(float(np.median(found)), 1),
                    "times as fast": round(float(np.median(ratios)), 2),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                with open(args.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
