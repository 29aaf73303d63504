"""Compiles the Triton kernels for NVIDIA GPUs, without one, and prints what they use.

    pip install triton
    python benchmarks/triton_kernels.py --targets 80 90 100

Registers are per thread, of at most 255. Bytes on the stack hold what does not fit in
registers. Shared memory is per program; an H100 has 227 KiB of it per multiprocessor.
"""

import argparse
import os
import pathlib
import re
import subprocess
import tempfile

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100])
parser.add_argument("--dtypes", nargs="+", default=["bf16"])
parser.add_argument("--features", type=int, default=64, help="a power of two")
parser.add_argument("--tokens", type=int, default=64, help="in a block")
parser.add_argument("--head-dim", type=int, default=64)
parser.add_argument("--warps", type=int, default=4)
parser.add_argument("--kernels", nargs="+", help="all by default")
args = parser.parse_args()

os.environ["KERAS_BACKEND"] = "torch"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keras_rfattn.experimental.triton import gradients, kernels

KERNELS = {
    kernels: ("sum_keys", "sum_queries", "scan", "outputs"),
    gradients: ("query_gradients", "key_gradients"),
}
IN_COMPUTE_DTYPE = {
    "query", "key", "value", "gradient", "output", "of_query", "of_key", "of_value",
}  # fmt: skip
SIZES = {"T", "S", "K", "H", "M", "W", "count"}


def source(kernel, dtype):
    """Returns the kernel with the types of its arguments."""
    constants = {
        "C": args.tokens, "HP": args.head_dim, "MP": args.features,
        "VP": args.head_dim, "BLOCKS": 8, "SHARED": True, "G": 1,
        "CAUSAL": True, "MODE": "before", "V": args.head_dim, "SIZE": 16,
    }  # fmt: skip
    names = kernel.arg_names
    if "MODE" in names:
        constants["M"] = args.features
    constants = {x: constants[x] for x in names if x in constants}
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in SIZES:
            types[name] = "i32"
        else:
            types[name] = f"*{dtype if name in IN_COMPUTE_DTYPE else 'fp32'}"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or (types[name] == "i32" and name in "HMW")
    }
    return ASTSource(kernel, types, constants, aligned)


def used(binary):
    """Returns the registers and bytes of stack per thread of a compiled kernel."""
    folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run(
            [folder / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    return re.search(r"REG:(\d+) STACK:(\d+)", told).groups()


def main():
    print("| Kernel | Target | Dtype | Registers | Stack, bytes | Shared, KiB |")
    print("|---|---|---|---|---|---|")
    for module, names in KERNELS.items():
        for name in names:
            if args.kernels and name not in args.kernels:
                continue
            for target in args.targets:
                for dtype in args.dtypes:
                    compiled = triton.compile(
                        source(getattr(module, name), dtype),
                        target=GPUTarget("cuda", target, 32),
                        options={"num_warps": args.warps},
                    )
                    registers, stack = used(compiled.asm["cubin"])
                    shared = compiled.metadata.shared / 1024
                    print(
                        f"| `{name}` | sm_{target} | {dtype} | {registers} | {stack} "
                        f"| {shared:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
