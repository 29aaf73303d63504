"""Sizes of arrays, which are no numbers while a program for any size is exported.

Such a size is a dimension variable of JAX, a `SymInt` of PyTorch, or a scalar tensor.
Comparing one raises an error or binds the program to the sizes of its example, so all
comparisons of sizes are made here.
"""

import math

import keras
from keras import ops


def is_traced():
    """Whether PyTorch records operations for a program, of other values and sizes."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_known(size):
    """Whether a size is a number."""
    return isinstance(size, int)


def is_zero(size):
    """Whether a size is known to be 0."""
    return is_known(size) and size == 0


def fits(size, limit):
    """Whether a size is known to be at most a number."""
    return is_known(size) and size <= limit


def smaller(size, limit):
    """The smaller of a size and a number; the number if the size is unknown."""
    return min(size, limit) if is_known(size) else limit


def product(*sizes):
    """The product of sizes; `None` if one is unknown."""
    return math.prod(sizes) if all(is_known(x) for x in sizes) else None


def num_blocks(length, size):
    """How many blocks of `size` hold `length` tokens, at least one.

    A PyTorch program of any length takes one block more than it needs. It would
    otherwise be bound to more than one block, because PyTorch treats a size of 1 as a
    number.
    """
    if is_known(length):
        return max(-(-length // size), 1)
    count = (length + (size - 1)) // size
    if keras.backend.backend() == "tensorflow":
        return ops.maximum(count, 1)
    if keras.backend.backend() != "torch":
        return count
    return _as_symbol(count + 1, length, size)


def _as_symbol(count, length, size):
    """A number of blocks without its formula, the same one for equal lengths.

    PyTorch cannot decide inequalities of quotients such as `8 * ((T + 7) // 8) >= T`,
    and would bind the program to what it cannot decide.
    """
    import torch

    if not (torch.compiler.is_exporting() and isinstance(length, torch.SymInt)):
        return count
    known = vars(length.node.shape_env).setdefault("_rfattn_blocks", {})
    key = length.node.expr, size
    if key not in known:
        symbol = torch.full((), count, dtype=torch.int64).item()
        torch._check(symbol >= 2)
        torch._check(symbol * size >= length)
        known[key] = symbol
    return known[key]


def leading(x, length, axis):
    """The first `length` entries of an array along an axis."""
    if keras.backend.backend() == "torch":
        # The size of a slice is unknown where that of the array is.
        return x.narrow(axis, 0, length)
    return x[(slice(None),) * axis + (slice(length),)]


def repeated(x, count, axis=0):
    """Each entry of an array along an axis `count` times, as of `ops.repeat`."""
    if keras.backend.backend() == "torch":
        # Keras makes an array of the count, so that the size would depend on values.
        return ops.convert_to_tensor(x).repeat_interleave(count, dim=axis)
    return ops.repeat(x, count, axis=axis)
