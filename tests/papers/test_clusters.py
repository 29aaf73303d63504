"""Hybrids of clusters: they are exact at centers and unbiased elsewhere."""

import numpy as np
import pytest

from keras_rfattn import papers
from keras_rfattn.papers.complex_exponential import diagonal
from tests import helpers as h
from tests.feature_maps.draws import DIM, DRAWS, LIMIT, estimates

pytestmark = pytest.mark.once


def test_pair_coefficient_is_one_at_its_centers():
    coefficient = papers.PairCoefficient(16, tau=1.5, projection="gaussian", seed=5)
    coefficient.build((None, None, DRAWS, DIM))
    x, y = np.float32([[0.5, -0.3, 0.2, 0.4]]), np.float32([[-0.6, 0.3, -0.1, -0.5]])
    a = diagonal(x, y, is_real=True)
    coefficient.set_matrix(np.repeat(a, DRAWS, axis=0))
    for shift in (0, 0.5):
        z = (x + shift) * a.real + y / a.real
        expected = np.exp(-np.sum(z**2, -1) / (2 * 1.5**2))
        found = estimates(coefficient, x + np.float32(shift), y)
        error = found.std(0) / np.sqrt(DRAWS)
        assert LIMIT * error < 0.1
        assert np.all(np.abs(found.mean(0) - expected) < LIMIT * error)
    assert expected < 0.95


def clusters(spread=0.05, heads=1):
    """Samples of two clusters of queries and two of keys, and the centers."""
    generator = np.random.default_rng(3)
    centers = 0.8 * generator.choice((-1.0, 1.0), size=(2, 2, DIM))
    centers[0, 1, 0], centers[1, 1, 0] = -centers[0, 0, 0], -centers[1, 0, 0]
    centers = centers * generator.uniform(0.5, 1.2, size=centers.shape)
    queries, keys = (
        np.concatenate([c + spread * generator.normal(size=(100, DIM)) for c in side])
        for side in centers
    )
    samples = [np.repeat(a[None], heads, axis=0) for a in (queries, keys)]
    return tuple(samples), centers


def test_complex_clusters_are_exact_at_their_centers():
    sample, _ = clusters()
    feature_map = papers.HybridClustered(2, form="complex", seed=1)
    feature_map.build((None, None, 1, DIM))
    feature_map.adapt([sample])
    centers = h.to_numpy(feature_map.query_centers), h.to_numpy(feature_map.key_centers)
    for x in centers[0][0]:
        for y in centers[1][0]:
            found = estimates(feature_map, x[None], y[None], draws=1)
            np.testing.assert_allclose(found, np.exp(x @ y), rtol=1e-4)
    far = estimates(feature_map, x[None] + np.float32(0.7), y[None], draws=1)
    assert abs(far / np.exp((x + 0.7) @ y) - 1) > 1e-3


@pytest.mark.parametrize("num_pairs", [None, 2])
@pytest.mark.parametrize("form", ["real", "complex"])
def test_clustered_is_unbiased(form, num_pairs):
    draws = 4000
    sample, centers = clusters(0.1, heads=draws)
    feature_map = papers.HybridClustered(
        8, form=form, num_pairs=num_pairs, projection="gaussian", seed=1
    )
    feature_map.build((None, None, draws, DIM))
    queries, keys = sample
    # Of many equal heads: the clusters of one.
    one = papers.HybridClustered(8, form=form, num_pairs=num_pairs, seed=1)
    one.build((None, None, 1, DIM))
    one.adapt([(queries[:1], keys[:1])])
    for name in (
        "query_centers",
        "key_centers",
        "query_active",
        "key_active",
        "matrix",
    ):
        value = h.to_numpy(getattr(one, name))
        getattr(feature_map, name).assign(np.repeat(value, draws, axis=0))
    x, y = (np.concatenate([s[0, :3], s[0, -3:]]) for s in sample)
    x, y = x.astype("float32"), y[[0, 3, 1, 4, 5, 2]].astype("float32")
    found = estimates(feature_map, x, y, draws)
    kernel = np.exp(np.sum(x * y, -1))
    error = found.std(0) / np.sqrt(draws)
    assert np.max(LIMIT * error / kernel) < 0.35
    assert np.all(np.abs(found.mean(0) - kernel) < LIMIT * error + 1e-5)


def test_gaussian_mixture_is_unbiased():
    draws = 4000
    sample, _ = clusters(0.1)
    feature_map = papers.HybridGaussianMixture(
        8, 4, tau=2.0, projection="gaussian", seed=1
    )
    feature_map.build((None, None, draws, DIM))
    one = papers.HybridGaussianMixture(8, 4, tau=2.0, seed=1)
    one.build((None, None, 1, DIM))
    one.adapt([sample])
    for parts in ("estimators", "coefficients"):
        for many, few in zip(
            getattr(feature_map, parts), getattr(one, parts), strict=True
        ):
            many.matrix.assign(np.repeat(h.to_numpy(few.matrix), draws, axis=0))
    x, y = (s[0, [0, 50, 150]].astype("float32") for s in sample)
    found = estimates(feature_map, x, y, draws)
    kernel = np.exp(np.sum(x * y, -1))
    error = found.std(0) / np.sqrt(draws)
    assert np.max(LIMIT * error / kernel) < 0.49
    assert np.all(np.abs(found.mean(0) - kernel) < LIMIT * error + 1e-5)


def test_errors_of_clusters():
    with pytest.raises(ValueError, match="`num_clusters` must be two positive"):
        papers.HybridClustered(num_clusters=(2, 0))
    with pytest.raises(ValueError, match="`num_pairs` from 1 to 4"):
        papers.HybridClustered(num_pairs=5)
    with pytest.raises(ValueError, match="`tau` must be positive"):
        papers.PairCoefficient(tau=-1)
    feature_map = papers.HybridClustered(2, num_clusters=(9, 2))
    feature_map.build((None, None, 1, DIM))
    with pytest.raises(ValueError, match="at most the number of tokens. Received: 9 c"):
        feature_map.adapt([(np.zeros((1, 4, DIM)), np.zeros((1, 4, DIM)))])
    with pytest.raises(ValueError, match="cannot adapt"):
        feature_map.adapt([])
