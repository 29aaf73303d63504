"""Checks of arguments that several folders share. Imports nothing of the package."""

import math

import numpy as np


def derive_seed(*entropy):
    """Hashes integers into a seed; other integers give another seed."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def is_integer(x):
    """Whether x is an integer of Python or NumPy, but not a boolean."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x):
    """Whether x is a real number of Python or NumPy, but not a boolean."""
    return isinstance(x, (int, float, np.number)) and not isinstance(x, bool)


def is_positive(x):
    """Whether x is a positive finite number."""
    return is_number(x) and 0 < x < math.inf


def check_flag(name, value):
    """Raises `ValueError` unless an argument is `True` or `False`."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(
            f"`{name}` must be `True` or `False`. Received: {name}={value!r:.80}."
        )


def check_choice(name, value, choices):
    """Raises `ValueError` unless an argument is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {choices}. Received: {name}={value!r}."
        )


def check_sizes(**sizes):
    """Raises `ValueError` unless all arguments are positive integers."""
    for name, size in sizes.items():
        if not is_integer(size) or size <= 0:
            raise ValueError(
                f"`{name}` must be a positive integer. Received: {name}={size!r}."
            )


def check_seed(seed):
    """Raises `ValueError` unless `seed` is a non-negative integer or `None`."""
    if seed is not None and not (is_integer(seed) and seed >= 0):
        raise ValueError(
            f"`seed` must be a non-negative integer or `None`. Received: seed={seed!r}."
        )
