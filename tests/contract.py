"""Describes a failed contract between a feature map and an algorithm."""

import contextlib
import os
import shlex

import keras

from tests import marks


@contextlib.contextmanager
def contract(name, algorithm, seed=0):
    """Adds to a failing assertion what identifies the case and how to run it again.

    The assertions of `tests/helpers.py` name the index of the worst number.

    Args:
        name: Name of the feature map.
        algorithm: Name of the attention algorithm.
        seed: Seed of the queries, keys and values.

    Raises:
        AssertionError: If the block raises one.
    """
    try:
        yield
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n"
            f"  feature map: {name}\n"
            f"  algorithm:   {algorithm}\n"
            f"  seed:        {seed}\n"
            f"  run again:   {command(name)}"
        ) from error


def command(name):
    """Returns the command that runs the current test of a feature map alone."""
    # pytest sets it to the name of the test and its phase.
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    file = marks.OWN.get(name)
    option = f" {shlex.quote(f'--map={file}')}" if file else ""
    return f"KERAS_BACKEND={keras.backend.backend()} pytest{option} -m '' '{test}'"
