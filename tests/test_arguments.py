"""Checks of arguments that several folders share."""

import numpy as np
import pytest

from keras_rfattn import arguments, papers
from keras_rfattn.ops import Options

pytestmark = pytest.mark.once


def test_numbers_of_numpy_are_numbers_and_booleans_are_not():
    for x in (3, np.int64(3), np.uint8(3)):
        assert arguments.is_integer(x) and arguments.is_positive(x)
    for x in (0.5, np.float32(0.5)):
        assert arguments.is_positive(x) and not arguments.is_integer(x)
    for x in (True, np.True_, "3", None, [3], 3j):
        assert not arguments.is_integer(x) and not arguments.is_positive(x)


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), True])
def test_one_check_of_positive_numbers_serves_all(wrong):
    assert not arguments.is_positive(wrong)
    for name, make in (
        ("temperature", Options),
        ("gamma", papers.KernelFeatures),
        ("sigma", papers.HybridGaussian),
        ("tau", papers.HybridGaussianMixture),
        ("parameter", papers.Poisson),
    ):
        with pytest.raises(ValueError, match=f"`{name}`.*must be.*positive"):
            make(**{name: wrong})


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "3", None])
def test_sizes_are_positive_integers(wrong):
    with pytest.raises(ValueError, match="`b` must be a positive integer.*b="):
        arguments.check_sizes(a=1, b=wrong)


def test_seeds_are_hashed():
    assert arguments.derive_seed(1, 2) == arguments.derive_seed(1, 2)
    assert len({arguments.derive_seed(i, j) for i in range(9) for j in range(9)}) == 81
