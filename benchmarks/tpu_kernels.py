"""Count the bytes that attention moves on a TPU, by XLA and by the Pallas kernels.

    pip install ".[jax,tpu]"
    python benchmarks/tpu_kernels.py [--chip v5e] [--tokens 1024]

The attention has 4 heads of 64 with FAVOR++ of 256 features, in bfloat16 with batch 1,
forward and with its gradient. The libtpu of PyPI compiles it and counts the bytes.
XLA's loop over blocks is unrolled, because XLA would count only one block of it.
Nothing is timed.
"""

import argparse
import functools
import json
import os

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--window", type=int)
    parser.add_argument("--results", default="tpu_kernels.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ["KERAS_BACKEND"] = "jax"
# Weights live on the CPU; only the compiler is that of a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from keras_rfattn import feature_maps
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options


def compiled(args, implementation, causal, with_gradient):
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=CHIPS[args.chip]
    )
    feature_map = feature_maps.get("favorpp", seed=0)
    feature_map.build((None, None, 4, 64))
    mask = AttentionMask(causal=causal, self_attention=True)
    options = Options(args.block_size, args.window, implementation=implementation)

    def loss(*tokens):
        output = attend(*tokens, feature_map, mask, options=options)
        return output.astype("float32").sum()

    function = jax.grad(loss, (0, 1, 2)) if with_gradient else loss
    where = SingleDeviceSharding(topology.devices[0])
    shape = 1, args.tokens, 4, 64
    array = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=where)
    return jax.jit(function).lower(array, array, array).compile()


def main(args):
    jax.lax.scan = functools.partial(jax.lax.scan, unroll=True)
    for causal in (True, False):
        for with_gradient in (False, True):
            found = {
                name: compiled(args, name, causal, with_gradient).cost_analysis()
                for name in ("xla", "pallas")
            }
            megabytes = {k: x["bytes accessed"] / 1e6 for k, x in found.items()}
            row = {
                **{k: v for k, v in vars(args).items() if k != "results"},
                "causal": causal, "gradient": with_gradient,
                **{f"{k} MB": round(x, 1) for k, x in megabytes.items()},
                "ratio": round(megabytes["xla"] / megabytes["pallas"], 2),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            with open(args.results, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
