"""The laws of `projections/base.py`, over the table."""

import functools
import statistics

import keras
import numpy as np
import pytest
from scipy import stats

from keras_rfattn import papers, projections
from keras_rfattn.papers.hadamard import hadamard_transform
from tests import helpers as h
from tests.marks import first

pytestmark = pytest.mark.once

NAMES = sorted(projections.PROJECTIONS)
KINDS = {
    **projections.PROJECTIONS,
    "hadamard of two factors": functools.partial(papers.Hadamard, 2),
    "halton from a random start": functools.partial(papers.Halton, "start"),
}
GAUSSIAN = [name for name, kind in KINDS.items() if kind().is_gaussian]
DIM, COUNT, HEADS, SEEDS = 4, 10, 100, 80
DRAWS = HEADS * SEEDS


def draws(projection=projections.Orthogonal, **arguments):
    """`(DRAWS, DIM, COUNT)`, independent along the first axis."""
    shape = (HEADS, DIM, COUNT)
    return np.concatenate(
        [h.to_numpy(projection(seed=s, **arguments)(shape)) for s in range(SEEDS)]
    )


def orthogonal_first(names):
    return first(["orthogonal", *(name for name in names if name != "orthogonal")])


@pytest.fixture(scope="module", params=orthogonal_first(KINDS))
def vectors(request):
    return draws(KINDS[request.param])


@pytest.fixture(scope="module", params=orthogonal_first(GAUSSIAN))
def gaussian_vectors(request):
    return draws(KINDS[request.param])


@pytest.fixture(scope="module")
def orthogonal():
    return draws()


def bound(tests, failing=1e-6):
    """Standard errors within which all of so many tests stay, but for `failing`."""
    return statistics.NormalDist().inv_cdf(1 - failing / (2 * tests))


def sign_errors(vectors):
    """By how many standard errors P(entry > 0) misses 1/2, for each entry."""
    positive = np.mean(vectors > 0, axis=0)
    return np.abs(positive - 0.5) / (0.5 / np.sqrt(len(vectors)))


class Unsigned(projections.Orthogonal):
    """What omitting the sign of R's diagonal gives."""

    def sample(self, generator, dim, count):
        blocks = -(-count // dim)
        q, _ = np.linalg.qr(generator.standard_normal((blocks, dim, dim)))
        rows = q.swapaxes(-1, -2).reshape(blocks * dim, dim)[:count]
        return rows * np.sqrt(dim)


def test_every_entry_is_positive_half_the_time(gaussian_vectors):
    limit = bound(DIM * COUNT)
    # The draws tell 1/2 from 0.54.
    assert limit * 0.5 / np.sqrt(DRAWS) < 0.04
    assert np.max(sign_errors(gaussian_vectors)) < limit


def test_negative_control_unsigned_directions_are_found_out():
    assert np.max(sign_errors(draws(Unsigned))) > 3 * bound(DIM * COUNT)


def test_every_vector_has_identity_covariance(vectors):
    covariance = np.einsum("nim,njm->mij", vectors, vectors) / DRAWS
    # Var(w_i²) is 2 and Var(w_i w_j) is 1 for Gaussian entries.
    error = np.sqrt((1 + np.eye(DIM)) / DRAWS)
    limit = bound(COUNT * DIM * DIM)
    assert limit * np.max(error) < 0.1
    assert np.max(np.abs(covariance - np.eye(DIM)) / error) < limit
    means = np.abs(np.mean(vectors, axis=0)) * np.sqrt(DRAWS)
    assert np.max(means) < bound(means.size)


def test_every_entry_is_normal(gaussian_vectors):
    # Beyond two moments, and for every vector, not their mixture.
    for m in range(COUNT):
        p = stats.kstest(gaussian_vectors[:, 0, m], "norm").pvalue
        assert p > 1e-6 / COUNT


def test_heads_are_independent(vectors):
    heads = vectors.reshape(SEEDS, HEADS, DIM * COUNT)
    assert len(np.unique(heads[0], axis=0)) == HEADS
    products = heads[:, 0::2] * heads[:, 1::2]
    error = np.abs(products.mean((0, 1))) * np.sqrt(SEEDS * HEADS / 2)
    assert np.max(error) < bound(error.size)


def test_blocks_are_orthogonal(orthogonal):
    gram = np.einsum("ndi,ndj->nij", orthogonal, orthogonal)
    lengths = np.sqrt(np.einsum("nii->ni", gram))
    cosine = gram / (lengths[:, :, None] * lengths[:, None, :])
    block = np.arange(COUNT) // DIM
    same = (block[:, None] == block) & ~np.eye(COUNT, dtype=bool)
    assert np.max(np.abs(cosine[:, same])) < 1e-5
    # Between blocks, the cosine of independent directions: E cos² = 1/d.
    others = np.mean(cosine[:, block[:, None] != block] ** 2, axis=0)
    np.testing.assert_allclose(others, 1 / DIM, rtol=0.1)


def test_lengths_are_those_of_gaussian_vectors(orthogonal):
    lengths = np.linalg.norm(orthogonal, axis=1)
    for m in range(COUNT):
        assert stats.kstest(lengths[:, m], stats.chi(DIM).cdf).pvalue > 1e-6 / COUNT
    # Inside a block too they are independent of each other.
    correlation = np.corrcoef(lengths.T) - np.eye(COUNT)
    assert np.max(np.abs(correlation)) * np.sqrt(DRAWS) < bound(COUNT**2)


def test_hadamard_blocks_are_orthogonal_and_nearly_normal():
    # Of a power of two no entry is cut off.
    vectors = h.to_numpy(papers.Hadamard(seed=1)((50, 64, 64)))
    gram = np.einsum("ndi,ndj->nij", vectors, vectors)
    lengths = np.sqrt(np.einsum("nii->ni", gram))
    cosine = gram / (lengths[:, :, None] * lengths[:, None, :]) - np.eye(64)
    assert np.max(np.abs(cosine)) < 1e-5
    entries = vectors[:, 5, 7]
    assert stats.kstest(entries, "norm").pvalue > 1e-3
    assert abs(np.mean(vectors**4) - 3) < 0.1
    # Against a transform by its definition, and of a length that is padded.
    from scipy.linalg import hadamard

    x = np.random.default_rng(0).normal(size=(3, 16))
    transform = hadamard_transform(x)
    h.assert_close(transform, x @ hadamard(16) / 4, 1e-12)
    assert h.to_numpy(papers.Hadamard(seed=1)((1, 5, 11))).shape == (1, 5, 11)


def test_simplex_directions_repel_each_other():
    vectors = draws(papers.Simplex)[:1000]
    gram = np.einsum("ndi,ndj->nij", vectors, vectors)
    lengths = np.sqrt(np.einsum("nii->ni", gram))
    cosine = gram / (lengths[:, :, None] * lengths[:, None, :])
    block = np.arange(COUNT) // DIM
    same = (block[:, None] == block) & ~np.eye(COUNT, dtype=bool)
    np.testing.assert_allclose(cosine[:, same], -1 / (DIM - 1), atol=1e-5)
    assert h.to_numpy(papers.Simplex(seed=1)((1, 1, 3))).shape == (1, 1, 3)


def test_halton_fills_space_more_evenly():
    # The mean of |w| over 256 vectors scatters less than that of independent ones.
    def spread(projection):
        vectors = [h.to_numpy(projection(seed=s)((1, 2, 256))) for s in range(40)]
        return np.std([np.mean(np.abs(v)) for v in vectors])

    for randomization in ("scramble", "start"):
        halton = functools.partial(papers.Halton, randomization)
        assert spread(halton) < 0.3 * spread(projections.Gaussian)


def test_halton_points_follow_each_other_from_a_random_start():
    points = stats.norm.cdf(h.to_numpy(papers.Halton("start", seed=3)((1, 2, 64))))
    # The next of a Halton sequence adds 1/b to one of its first b - 1 intervals.
    for base, x in zip((2, 3), points[0], strict=True):
        steps = np.diff(x)[x[:-1] < 1 - 1 / base]
        np.testing.assert_allclose(steps, 1 / base, atol=1e-6)


def test_a_hadamard_factor_alone_has_equal_entries():
    vectors = h.to_numpy(papers.Hadamard(num_factors=1, seed=1)((1, 16, 32)))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(np.abs(vectors), np.tile(lengths / 4, (1, 16, 1)), 1e-5)


@pytest.mark.parametrize(
    "distribution, parameters, probability",
    [
        (papers.PoissonCounts, (0.4, 2.5), lambda k, r: stats.poisson.pmf(k, r)),
        (papers.GeometricCounts, (0.8, 0.3), lambda k, p: p * (1 - p) ** k),
    ],
)
def test_counts_follow_their_distribution(distribution, parameters, probability):
    counts = h.to_numpy(distribution(parameters, seed=3)((2, 100, 400)))
    for head, parameter in enumerate(parameters):
        for k in range(4):
            p = probability(k, parameter)
            error = np.sqrt(p * (1 - p) / counts[head].size)
            assert bound(8) * error < 0.02
            assert abs(np.mean(counts[head] == k) - p) < bound(8) * error
    assert np.all(counts == np.round(counts)) and counts.min() == 0
    again = distribution.from_config(distribution(parameters, seed=3).get_config())
    h.assert_same(again((2, 100, 400)), counts)


def test_lengths_may_all_be_the_root_of_the_dimension():
    vectors = h.to_numpy(projections.Orthogonal("sqrt_dim", seed=1)((3, 7, 20)))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 7**0.5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 4, 11])
@pytest.mark.parametrize("name", KINDS)
def test_any_count(name, count):
    vectors = h.to_numpy(KINDS[name](seed=2)((2, 4, count)))
    assert vectors.shape == (2, 4, count)
    assert np.all(np.linalg.norm(vectors, axis=1) > 0)


def test_numbers_are_those_of_philox():
    generator = np.random.Generator(np.random.Philox(5))
    expected = [generator.standard_normal((6, 3)).T for _ in range(2)]
    actual = projections.Gaussian(seed=5)((2, 3, 6))
    h.assert_same(actual, np.stack(expected).astype("float32"))


# Written down once: on no backend, nor in any later version, may they change.
FIRST = {
    "gaussian": [2.2078643, 1.5576872, -0.4778307],
    "hadamard": [0.9666148, 0.9666148, 0.9666148],
    "halton": [0.7052066, -0.7909239, 1.8569297],
    "simplex": [1.2508385, 1.0661817, 0.0045969],
    "orthogonal": [1.3146539, 0.5227884, 0.836504],
}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_the_same_everywhere(name):
    vectors = projections.get(name, seed=123)((2, 3, 5))
    assert keras.backend.standardize_dtype(vectors.dtype) == "float32"
    np.testing.assert_allclose(h.to_numpy(vectors)[1, :, 4], FIRST[name], rtol=1e-5)


# How many of them may be equal.
FEW_NUMBERS = {"hadamard": 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name):
    shape = (2, 3, 5)
    one, same, other = (projections.get(name, seed=s)(shape) for s in (1, 1, 2))
    h.assert_same(one, same)
    # A Hadamard matrix of few dimensions has few numbers.
    equal = h.to_numpy(one) == h.to_numpy(other)
    assert np.mean(equal) < FEW_NUMBERS.get(name, 1e-9)
    # Nor does a call change what the next one gives.
    projection = projections.get(name, seed=1)
    projection(shape)
    h.assert_same(projection(shape), one)


@pytest.mark.parametrize(
    "projection",
    [kind(seed=3) for kind in KINDS.values()]
    + [projections.Orthogonal("sqrt_dim", seed=4)],
    ids=lambda x: "-".join(map(str, x.get_config().values())),
)
def test_config_round_trip(projection):
    config = keras.saving.serialize_keras_object(projection)
    again = projections.get(config)
    assert type(again) is type(projection)
    assert again.get_config() == projection.get_config()
    h.assert_same(again((1, 4, 6)), projection((1, 4, 6)))


def test_get():
    projection = projections.Gaussian(seed=9)
    assert projections.get(projection) is projection
    assert projections.get("gaussian", seed=9).seed == 9
    for wrong in ("hadamar", 3, None, keras.initializers.Zeros()):
        with pytest.raises(ValueError, match="must be one of .*'gaussian'.*Received"):
            projections.get(wrong)
    with pytest.raises(ValueError, match="`norms` must be 'chi' or 'sqrt_dim'"):
        projections.Orthogonal("unit")
    with pytest.raises(ValueError, match="`randomization` must be one of .*Received"):
        papers.Halton("owen")
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="`num_factors` .* positive integer. Rec"):
            papers.Hadamard(wrong)
    with pytest.raises(NotImplementedError, match="must implement `sample"):
        projections.Projection()((1, 2, 3))
