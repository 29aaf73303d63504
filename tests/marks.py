"""Marks of tests, and the values of parameters with which tests run by default."""

import os

import pytest

# For tests that JAX and TensorFlow compile for long, although they meet nothing that
# other tests on these backends do not meet.
ONE_BACKEND = (pytest.mark.full, pytest.mark.once)

# For tests and values of parameters that JAX, which compiles every operation, runs for
# seconds, and the others at once: by default JAX leaves them out.
SLOW_ON_JAX = (pytest.mark.full,) if os.environ.get("KERAS_BACKEND") == "jax" else ()

# One map for each form of features; see `tests/forms.py`.
MAP_FORMS = ("favor", "favorpp", "polysketch")
# Maps from outside the package: their names, each with the file that `--map` named, or
# `None` for CONTRIBUTING's example.
OWN = {}


def first(values):
    """Returns a parameter for each value; by default tests only run on the first."""
    return _params(values, lambda i, _: i == 0)


def slow_on_jax(test):
    """Decorates a test that JAX leaves out by default."""
    for mark in SLOW_ON_JAX:
        test = mark(test)
    return test


def first_on_jax(values):
    """Returns a parameter for each value; by default JAX only runs the first."""
    return [
        pytest.param(*row, marks=SLOW_ON_JAX if i else ())
        for i, row in enumerate(_rows(values))
    ]


def each_map(rows):
    """Returns a parameter for each name of a map, or tuple that begins with a name.

    By default, and on JAX and TensorFlow in CI, tests only run on the maps of
    `MAP_FORMS` and of `OWN`.
    """
    return _params(rows, lambda _, row: row[0] in {*MAP_FORMS, *OWN})


def own_maps(rows):
    """Returns parameters as `each_map` does; by default tests only run on `OWN`.

    For slow contracts that `tests/ops` tests on synthetic maps on every backend.
    """
    return _params(rows, lambda _, row: row[0] in OWN)


def _params(rows, is_default):
    return [
        pytest.param(*row, marks=() if is_default(i, row) else ONE_BACKEND)
        for i, row in enumerate(_rows(rows))
    ]


def _rows(values):
    return [row if isinstance(row, tuple) else (row,) for row in values]
