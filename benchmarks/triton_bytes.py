"""Count the bytes that the Triton kernels read and write, in Triton's interpreter.

    pip install torch triton
    python benchmarks/triton_bytes.py --tokens 2048

The floor reads or writes each array once: queries, keys, values and outputs; in the
backward pass also their gradients. One head of 64, bfloat16. Nothing is timed, and what
PyTorch's operations around the kernels move is not counted.
"""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])

if __name__ == "__main__":  # parse before the slow imports
    args = parser.parse_args()

os.environ["KERAS_BACKEND"] = "torch"
os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import InterpreterBuilder

from keras_rfattn.experimental.triton.convert import SIZES
from keras_rfattn.experimental.triton.launch import linear_attention

DIM = 64


class Counter:
    """Counts the bytes of the loads and stores of all kernels."""

    def __init__(self):
        self.bytes = 0
        load, store = (
            InterpreterBuilder.create_masked_load,
            InterpreterBuilder.create_masked_store,
        )

        def counted_load(builder, pointers, mask, *rest):
            self.add(pointers, mask)
            return load(builder, pointers, mask, *rest)

        def counted_store(builder, pointers, value, mask, *rest):
            self.add(pointers, mask)
            return store(builder, pointers, value, mask, *rest)

        InterpreterBuilder.create_masked_load = counted_load
        InterpreterBuilder.create_masked_store = counted_store

    def add(self, pointers, mask):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.bytes += int(mask.data.sum()) * size

    def of(self, function):
        """Returns the bytes that a function moves, and its result."""
        before = self.bytes
        found = function()
        return self.bytes - before, found


def attention(arrays, causal):
    query, key, value, *maps, term = arrays
    return linear_attention((query, key), maps, term, value, causal, SIZES[causal])


def main(args):
    counter = Counter()
    print("| Width | Causal | Forward / floor | Backward / floor |")
    print("|---|---|---|---|")
    for width in args.widths:
        for causal in (True, False):
            generator = torch.Generator().manual_seed(0)
            shapes = [(1, args.tokens, 1, DIM)] * 3
            tokens = [torch.randn(x, generator=generator).bfloat16() for x in shapes]
            shapes = [(1, 1, DIM, width)] * 2 + [(1, 1, 1, width)] * 2
            maps = [torch.randn(x, generator=generator) / 8 for x in shapes]
            arrays = [*tokens, *maps, torch.zeros(1, args.tokens, 1)]
            arrays = [x.requires_grad_() for x in arrays]
            forward, output = counter.of(lambda: attention(arrays, causal))  # noqa: B023
            backward, _ = counter.of(
                lambda: torch.autograd.grad(output.float().sum(), arrays)  # noqa: B023
            )
            array = args.tokens * DIM * 2
            print(
                f"| {width} | {causal} | {forward / (4 * array):.2f} "
                f"| {backward / (8 * array):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(args)
