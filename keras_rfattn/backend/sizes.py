"""Sizes of arrays, which may be symbolic while a program for any size is exported.

A symbolic size is a dimension variable of JAX, a `SymInt` of PyTorch, or a scalar
tensor. Comparing one raises an error or binds the program to the sizes of its example
inputs, so these functions compare sizes.
"""

import math

import keras
import numpy as np


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


def heads_at_once(arrays, size, limit):
    """Returns how many heads of `size` floats a limit holds, and how many there are."""
    leaves = [x for x in keras.tree.flatten(arrays) if x is not None]
    count = max(x.shape[1] for x in leaves)
    most = max(1, limit // max(size, 1))
    return max(i for i in range(1, count + 1) if count % i == 0 and i <= most), count
