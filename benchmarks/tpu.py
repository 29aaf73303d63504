"""Report what a TPU's compiler plans for a training step, without a TPU.

    pip install ".[jax,hub,tpu]"
    python benchmarks/tpu.py [--chip v5e] [--lengths 8192 32768] [--results FILE]

The step is one of SGD on GPT-2 small in mixed bfloat16 with batch 1, on the mean square
of its outputs. The libtpu of PyPI compiles it for the chip. For each mechanism and
length, the benchmark prints the gigabytes of weights and of everything else that is
alive at the peak, and the compiler's count of operations and bytes. The compiler
refuses a program that does not fit, and says how much it would need. XLA counts what is
inside a loop once: `tera-operations` and `GB accessed` are right for softmax only.
"""

import argparse
import json
import os
import re
import time

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "favorpp"])
    parser.add_argument("--num-features", type=int, default=256)
    parser.add_argument("--window", type=int)
    parser.add_argument("--block-size", type=int, default=512,
                        help="default: a TPU's; a CPU has 64")  # fmt: skip
    parser.add_argument("--results", default="tpu.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Weights live on the CPU; only the compiler is that of a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import keras
import keras_hub
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import keras_rfattn


def device(chip):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    return topology.devices[0]


def step(args, mechanism, length, batch=1):
    """Returns a function for a step of SGD on a mean square, and its arguments."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    model = keras_hub.models.GPT2Backbone(
        vocabulary_size=50257, num_layers=args.layers, num_heads=12, hidden_dim=768,
        intermediate_dim=3072, dropout=0.0, max_sequence_length=length,
    )  # fmt: skip
    if mechanism != "softmax":
        keras_rfattn.replace_attention(
            model, mechanism, num_features=args.num_features, window=args.window,
            block_size=args.block_size, seed=0,
        )  # fmt: skip

    def loss(trained, others, tokens):
        inputs = {"token_ids": tokens, "padding_mask": tokens >= 0}
        output, others = model.stateless_call(trained, others, inputs, training=True)
        return keras.ops.mean(output.astype("float32") ** 2), others

    def update(trained, others, tokens):
        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(
            trained, others, tokens
        )
        trained = [w - 0.1 * g for w, g in zip(trained, gradients, strict=True)]
        return value, trained, others

    parts = model.trainable_variables, model.non_trainable_variables
    variables = [[v.value for v in part] for part in parts]
    return update, (*variables, jax.ShapeDtypeStruct((batch, length), "int32"))


def compiled(function, arguments, chip):
    where = SingleDeviceSharding(device(chip))
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments
    )
    call = jax.jit(function, donate_argnums=(0, 1))
    return call.lower(*arguments).compile()


def main(args):
    for mechanism in args.mechanisms:
        for length in args.lengths:
            start = time.time()
            row = {
                "chip": args.chip, "layers": args.layers, "mechanism": mechanism,
                "num_features": args.num_features, "window": args.window,
                "block_size": args.block_size, "tokens": length,
            }  # fmt: skip
            try:
                program = compiled(*step(args, mechanism, length), args.chip)
            except jax.errors.JaxRuntimeError as error:
                found = re.search(r"Used (\S+) of (\S+) hbm", str(error))
                row["refused"] = found.group() if found else str(error)[:300]
            else:
                memory, cost = program.memory_analysis(), program.cost_analysis()
                row |= {
                    "weights GB": memory.argument_size_in_bytes / 1e9,
                    "others GB": memory.temp_size_in_bytes / 1e9,
                    "tera-operations": cost["flops"] / 1e12,
                    "GB accessed": cost["bytes accessed"] / 1e9,
                }
            row["seconds to compile"] = time.time() - start
            row = {k: round(x, 3) if isinstance(x, float) else x
                   for k, x in row.items()}  # fmt: skip
            print(json.dumps(row), flush=True)
            with open(args.results, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
