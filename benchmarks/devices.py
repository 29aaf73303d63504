"""Count the bytes that devices exchange in a training step, by sequence length (JAX).

    python benchmarks/devices.py [--devices 8] [--lengths 512 1024 2048 4096]

A GPT-2 of two layers with linear attention runs forward and backward over simulated
devices, which divide the data, the heads (`layout_map`) or the tokens
(`SequenceParallel`). `--mechanism softmax` runs softmax for comparison. The benchmark
prints the bytes that a device receives, by kind of exchange, read from the compiled
program. It prints no time, as simulated devices have none. `attention` is what one
attention call alone exchanges.
"""

import argparse
import json
import os
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute",
         "all-to-all")  # fmt: skip
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+",
                        default=[512, 1024, 2048, 4096])  # fmt: skip
    parser.add_argument("--mechanism", default="favorpp")
    parser.add_argument("--num-features", type=int, default=64)
    parser.add_argument("--results", default="devices.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # before JAX counts its devices
    args = parse_arguments()
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(args.devices)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import keras_hub
import numpy as np
from jax import numpy as jnp

import keras_rfattn
from keras_rfattn import distribution
from keras_rfattn.experimental.sequence_parallel import SequenceParallel

HEADS, DIM = 8, 64


def divided(way, count):
    """Returns a `keras.distribution` that divides data, heads or tokens."""
    devices = keras.distribution.list_devices()
    if way == "data":
        return keras.distribution.DataParallel(devices=devices)
    axes = {"heads": ["batch", "model"], "tokens": ["batch", "sequence"]}[way]
    mesh = keras.distribution.DeviceMesh((1, count), axes, devices)
    layouts = keras.distribution.LayoutMap(mesh)
    if way == "tokens":
        return SequenceParallel(layout_map=layouts, batch_dim_name="batch")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def model_of(args, length, way):
    keras.utils.set_random_seed(0)
    model = keras_hub.models.GPT2Backbone(
        vocabulary_size=512, num_layers=2, num_heads=HEADS, hidden_dim=HEADS * DIM,
        intermediate_dim=4 * HEADS * DIM, dropout=0.0, max_sequence_length=length,
    )  # fmt: skip
    if args.mechanism != "softmax":
        keras_rfattn.replace_attention(
            model, args.mechanism, num_features=args.num_features, seed=0
        )
    if way == "heads":
        mesh = keras.distribution.distribution().device_mesh
        distribution.distribute(model, distribution.layout_map(model, mesh))
    return model


def step(model, batch, length):
    """Returns the compiled program of a model's forward and backward pass, as text."""
    tokens = np.ones((batch, length), "int32")
    x = {"token_ids": tokens, "padding_mask": tokens}
    layout = keras.distribution.distribution().get_data_layout(tokens.shape)
    place = keras.distribution.distribute_tensor
    x = {name: place(jnp.asarray(array), layout) for name, array in x.items()}
    fixed = [v.value for v in model.non_trainable_variables]

    def loss(trained, x):
        output, _ = model.stateless_call(trained, fixed, x)
        return jnp.mean(output**2)

    trained = [v.value for v in model.trainable_variables]
    return jax.jit(jax.grad(loss)).lower(trained, x).compile().as_text()


def attention(args, length):
    """Returns the compiled program of one attention call with divided tokens."""
    from keras_rfattn.layers.attend import attend
    from keras_rfattn.ops import AttentionMask

    feature_map = keras_rfattn.feature_maps.get(
        args.mechanism, num_features=args.num_features, seed=0
    )
    feature_map.build((None, None, HEADS, DIM))
    where = AttentionMask(causal=True, self_attention=True)
    tokens = [jnp.ones((1, length, HEADS, DIM))] * 3
    layout = keras.distribution.distribution().get_data_layout(tokens[0].shape)
    tokens = [keras.distribution.distribute_tensor(x, layout) for x in tokens]

    def loss(*tokens):
        return jnp.mean(attend(*tokens, feature_map, where) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*tokens).compile().as_text()


def exchanged(text):
    """Returns the bytes a device receives in a program, by kind of exchange."""
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for line in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
            for dtype, shape in re.findall(r"(\w+)\[([0-9,]*)\]", line):
                size = np.prod([int(n) for n in shape.split(",") if n], dtype=int)
                found[kind] += int(size) * BYTES.get(dtype, 4)
    return {kind: count for kind, count in found.items() if count}


def main(args):
    cases = [("data", "model"), ("heads", "model"), ("tokens", "model"),
             ("tokens", "attention")]  # fmt: skip
    for way, what in cases:
        for length in args.lengths:
            keras.distribution.set_distribution(divided(way, args.devices))
            if what == "attention":
                if args.mechanism == "softmax":
                    continue
                text = attention(args, length)
            else:
                batch = args.devices if way == "data" else 1
                text = step(model_of(args, length, way), batch, length)
            keras.distribution.set_distribution(None)
            row = {
                "mechanism": args.mechanism, "divided": way, "of": what,
                "devices": args.devices, "length": length, "bytes": exchanged(text),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            with open(args.results, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
