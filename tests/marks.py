"""Marks of tests, and the feature maps on which tests run by default."""

import pytest

# For tests that JAX and TensorFlow compile for long, although they meet nothing that
# other tests on these backends do not meet.
ONE_BACKEND = (pytest.mark.full, pytest.mark.once)

# One map for each form of features; see `tests/forms.py`.
MAP_FORMS = ("favor", "favorpp", "hybrid_angular", "polysketch")
# Names of the maps from outside the package: CONTRIBUTING's example, and those of `--map`.
OWN = set()


def each_map(names):
    """Returns a parameter for each name of a map; most of them only run with `full`.

    The maps of `MAP_FORMS` and of `OWN` run by default and on every backend.
    """
    return [
        pytest.param(name, marks=() if name in {*MAP_FORMS, *OWN} else ONE_BACKEND)
        for name in names
    ]


def first(values):
    """Returns a parameter for each value; all but the first only run with `full`."""
    values = [x if isinstance(x, tuple) else (x,) for x in values]
    return [
        pytest.param(*x, marks=ONE_BACKEND if i else ()) for i, x in enumerate(values)
    ]
