"""Compiles the Mosaic GPU kernels for an H100, and prints the resources that they need.

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt
    python benchmarks/mosaic_kernels.py [--head-dims 64 128] [--dtypes bfloat16]

It needs no GPU. The two packages must have the version of JAX; they contain the
compiler. Registers are per thread (at most 255), and the stack holds what did not fit
in them, in bytes per thread. Shared memory is that of a program, of at most 227 KiB.
"""

import argparse
import contextlib
import os
import pathlib
import re
import sys
import tempfile
import time

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
parser.add_argument("--tokens", type=int, default=1024)
parser.add_argument("--features", type=int, default=128)
parser.add_argument("--kernels", nargs="+", help="all by default")
args = parser.parse_args()

os.environ["KERAS_BACKEND"] = "jax"
# The compiler's own libraries are enough, where those of CUDA are missing.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from keras_rfattn.fused.mosaic.gradients import key_slopes, query_slopes
from keras_rfattn.fused.mosaic.linear import prepared
from keras_rfattn.fused.mosaic.outputs import outputs
from keras_rfattn.fused.mosaic.sums import Sums, sum_tokens

# The compiler needs these properties of an H100.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
KERNELS = "sum_tokens", "outputs", "query_slopes", "key_slopes"


def call(kernel, is_causal, head_dim, dtype):
    """Returns a function that runs one kernel, and the shapes of its arguments."""
    batch, heads, groups, length = 1, 2, 2, args.tokens

    def wide(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    tokens = [
        jax.ShapeDtypeStruct((batch, length, n, head_dim), dtype)
        for n in (heads * groups, heads)
    ]
    vectors, bias = (
        wide(1, heads, head_dim, args.features),
        wide(1, heads, 1, args.features),
    )
    given = tokens, (vectors, vectors, bias, bias), wide(batch, heads, length)
    plans = []

    def arrays_of(*given):
        plan, arrays = prepared(*given, is_causal, 8)
        plans.append(plan)
        return arrays

    arrays = jax.eval_shape(arrays_of, *given, tokens[1])
    plan = plans[0]
    parts = plan.parts(length) if is_causal else 1
    lanes = batch, heads, plan.tiles, parts, 64
    per_query = wide(batch, heads * groups, length)
    known = tokens[0], per_query, per_query
    pair = Sums(wide(*lanes), wide(*lanes)), wide(*lanes, head_dim)
    if kernel == "sum_tokens":

        def run(x):
            keys = x.key, x.key_vectors, x.key_bias, x.term, x.value
            return sum_tokens(plan, 1, *keys)

        return run, (arrays,)
    if kernel == "outputs":
        return lambda *x: outputs(plan, *x), (arrays, *pair)
    if kernel == "query_slopes":
        return lambda *x: query_slopes(plan, *x), (arrays, *pair, *known)
    pair = Sums(*[wide(*lanes)] * 3), pair[1]
    blocks = wide(batch, heads, plan.tiles, length // 64, 64)
    return lambda *x: key_slopes(plan, *x), (arrays, *pair, *known, blocks)


@contextlib.contextmanager
def captured(into):
    """Appends to a list what the compiler prints meanwhile."""
    sys.stdout.flush()
    kept = [os.dup(i) for i in (1, 2)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            for i in (1, 2):
                os.dup2(file.fileno(), i)
            yield
        finally:
            sys.stdout.flush()
            for i, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, i)
                os.close(descriptor)
            file.seek(0)
            into.append(file.read())


def used(text):
    """Returns registers, bytes of stack and KiB of shared memory, as printed."""
    registers = re.search(r"Used (\d+) registers", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    shared = re.search(r"smem_scratch_bytes=(\d+)", text)
    numbers = [x and int(x.group(1)) for x in (registers, stack, shared)]
    return ["?" if x is None else x for x in numbers]


def main():
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    print(f"{pathlib.Path(__file__).name}, JAX {jax.__version__}, {args.features=}")
    print("| Kernel | Causal | Head dim | Dtype | Registers | Stack, bytes |", end="")
    print(" Shared, KiB | Seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for kernel in args.kernels or KERNELS:
        for is_causal in (True, False):
            if kernel == "sum_tokens" and not is_causal:
                continue
            for head_dim in args.head_dims:
                for dtype in args.dtypes:
                    run, shapes = call(kernel, is_causal, head_dim, dtype)
                    shapes = jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(
                            x.shape, x.dtype, sharding=sharding
                        ),
                        shapes,
                    )
                    printed, start = [], time.time()
                    with captured(printed):
                        jax.jit(run).trace(*shapes).lower().compile()
                    registers, stack, shared = used(printed[0])
                    shared = shared if shared == "?" else round(shared / 1024)
                    print(
                        f"| `{kernel}` | {'yes' if is_causal else 'no'} | {head_dim} "
                        f"| {dtype} | {registers} | {stack} | {shared} "
                        f"| {time.time() - start:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
