"""Sizes of arrays, which may be symbolic while a program for any size is exported.

A symbolic size is a dimension variable of JAX, a `SymInt` of PyTorch, or a scalar
tensor. Comparing one raises an error or binds the program to the sizes of its example
inputs, so all comparisons of sizes are made here.
"""

import math

import keras
import numpy as np
from keras import ops


def is_traced():
    """Returns whether PyTorch is compiling or tracing a program."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_known(size):
    """Returns whether a size is a number."""
    return isinstance(size, (int, np.integer))


def is_zero(size):
    """Returns whether a size is known to be 0."""
    return is_known(size) and size == 0


def fits(size, limit):
    """Returns whether a size is known to be at most `limit`."""
    return is_known(size) and size <= limit


def smaller(size, limit):
    """Returns the smaller of a size and a number; the number if the size is unknown."""
    return min(size, limit) if is_known(size) else limit


def product(*sizes):
    """Returns the product of sizes; `None` if one is unknown."""
    return math.prod(sizes) if all(is_known(x) for x in sizes) else None


def num_blocks(length, size):
    """Returns how many blocks of `size` hold `length` tokens, at least one.

    A PyTorch program for any length takes one block more than it needs. Otherwise the
    program would not accept a single block, because PyTorch treats a size of 1 as a
    constant.
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
    """Returns a number of blocks as a new symbol, the same one for equal lengths.

    PyTorch cannot decide inequalities of quotients such as `8 * ((T + 7) // 8) >= T`,
    and would bind the program to what it cannot decide. The new symbol has no formula.
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
    """Returns the first `length` entries of an array along an axis."""
    if keras.backend.backend() == "torch":
        # The size of a slice would be unknown if that of the array is.
        return x.narrow(axis, 0, length)
    return x[(slice(None),) * axis + (slice(length),)]
