"""Kernel coefficients average to their Gaussian; some have no error at its ends."""

import numpy as np
import pytest

from keras_rfattn import feature_maps as maps
from keras_rfattn import papers
from tests.feature_maps.draws import DIM, LIMIT, estimates, pairs

pytestmark = pytest.mark.once

N = 2
SOME = 20_000
MATRIX = np.random.default_rng(9).normal(size=(DIM, DIM)) / 2


def coefficient(feature_map, matrix=None, seed=3):
    return papers.KernelCoefficient(
        feature_map, matrix, width=1.3, constant=0.9, factor=-0.7, seed=seed
    )


def base(cls, **arguments):
    return cls(N, projection="gaussian", seed=0, **arguments)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("matrix", [None, MATRIX])
@pytest.mark.parametrize("cls", [maps.FavorPlus, papers.Favor, papers.HybridAngular])
def test_a_kernel_coefficient_averages_to_its_gaussian(cls, matrix):
    x, y = pairs()
    part = coefficient(base(cls), matrix)
    found = part.constant + estimates(part, x, y, draws=SOME)
    moved = x - y if matrix is None else x + y @ matrix.T
    expected = 0.9 - 0.7 * np.exp(-np.sum(moved**2, -1) / (2 * 1.3**2))
    error = found.std(0) / np.sqrt(SOME)
    assert np.max(LIMIT * error) < 0.05
    assert np.all(np.abs(found.mean(0) - expected) < LIMIT * error + 1e-6)


@pytest.mark.parametrize(
    ("cls", "equal", "opposite"),
    [
        (papers.Favor, True, False),
        (maps.FavorPlus, False, True),
        (papers.HybridAngular, True, True),
    ],
)
def test_where_a_kernel_coefficient_has_no_variance(cls, equal, opposite):
    x, _ = pairs(radius=0.9)
    for y, is_exact in ((x, equal), (-x, opposite)):
        spread = estimates(coefficient(base(cls)), x, y, draws=50).std(0)
        assert np.all(spread < 1e-5) == is_exact
        assert np.all(spread > 1e-3) != is_exact


@pytest.mark.full
@pytest.mark.once
def test_a_hybrid_of_kernel_coefficients_is_unbiased_and_saved():
    x, y = pairs(radius=0.8)
    parts = [base(papers.FavorPlusPair), base(papers.Favor)]
    nested = coefficient(base(papers.HybridAngular), MATRIX)
    hybrid = papers.Hybrid(parts, [nested], seed=5)
    found = estimates(hybrid, x, y, draws=SOME)
    error = found.std(0) / np.sqrt(SOME)
    assert np.all(np.abs(found.mean(0) - np.exp(np.sum(x * y, -1))) < LIMIT * error)
    again = maps.deserialize(maps.serialize(hybrid))
    few = estimates(again, x, y, draws=20)
    fresh = maps.deserialize(maps.serialize(hybrid))
    assert np.array_equal(few, estimates(fresh, x, y, draws=20))
    assert found.shape[1] == few.shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"feature_map": "elu"}, "must estimate softmax"),
        ({"width": 0.0}, "`width` must be positive"),
        ({"factor": 0}, "`factor` must not be 0"),
        ({"matrix": np.eye(3)[:2]}, r"shape \(H, H\)"),
    ],
)
def test_wrong_kernel_coefficients_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        papers.KernelCoefficient(**arguments)
    with pytest.raises(ValueError, match="`matrix` must have shape"):
        papers.KernelCoefficient(matrix=np.eye(3)).build((None, None, 2, DIM))
