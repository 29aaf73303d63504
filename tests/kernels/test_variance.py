"""The oracle itself, against NumPy draws that use no other part of the library."""

import numpy as np
import pytest

from keras_rfattn.kernels import variance
from keras_rfattn.papers import second_moments
from tests.marks import first

pytestmark = pytest.mark.once

DIM, DRAWS = 4, 1_000_000
PAIRS = [(0.3, 1.0), (0.5, 0.0), (0.4, -0.8)]


def pair(size, cosine):
    x, y = np.zeros(DIM), np.zeros(DIM)
    x[0] = size
    y[:2] = size * cosine, size * np.sqrt(1 - cosine**2)
    return x, y


@pytest.fixture(scope="module")
def w():
    return np.random.default_rng(0).normal(size=(DRAWS, DIM))


def check(products, x, y, expected):
    """Mean and variance, each within 5.5 of its own standard errors."""
    kernel = np.exp(x @ y)
    error = np.sqrt(expected / DRAWS)
    # A factor of 2 % in the kernel would show.
    assert 5.5 * error < 0.02 * kernel
    assert abs(products.mean() - kernel) < 5.5 * error + 1e-9
    squares = (products - kernel) ** 2
    error = squares.std() / np.sqrt(DRAWS)
    assert 5.5 * error < 0.1 * expected + 1e-9
    assert abs(squares.mean() - expected) < 5.5 * error + 1e-9


def generalized(w, x, y, a, s):
    b = np.sqrt(s * (1 - 4 * a) + 0j)
    c, d = -(s + 1) / 2, (1 - 4 * a + 0j) ** (DIM / 4)
    square = np.sum(w * w, -1)
    first = d * np.exp(a * square + b * (w @ x) + c * x @ x)
    second = d * np.exp(a * square + s * b * (w @ y) + c * y @ y)
    # Of the Gaussian kernel, hence the factor to softmax's.
    return (first * second).real * np.exp((x @ x + y @ y) / 2)


@pytest.mark.parametrize("size, cosine", first(PAIRS))
@pytest.mark.parametrize(
    "a, s", [(0.0, 1), (0.0, -1), (-0.03, 1), (-0.1, 1), (0.02 + 0.05j, -1)]
)
def test_generalized_exponential(w, size, cosine, a, s):
    x, y = pair(size, cosine)
    expected = float(second_moments.generalized_exponential(x, y, a, s))
    check(generalized(w, x, y, a, s), x, y, expected)


@pytest.mark.parametrize("size, cosine", first(PAIRS))
def test_positive_pair(w, size, cosine):
    x, y = pair(size, cosine)
    products = np.cosh(w @ (x + y)) * np.exp(-(x @ x + y @ y) / 2)
    check(products, x, y, float(second_moments.positive_pair(x, y)))


@pytest.mark.parametrize("size, cosine", first(PAIRS))
def test_positive_pair_has_one_second_moment(size, cosine):
    x, y = pair(size, cosine)
    moment = second_moments.log_moment_positive_pair(x, y)
    np.testing.assert_allclose(
        second_moments.variance(moment, x, y),
        second_moments.positive_pair(x, y),
        1e-9,
        1e-12,
    )


@pytest.mark.parametrize("size, cosine", first(PAIRS))
def test_an_a_for_each_direction(w, size, cosine):
    x, y = pair(size, cosine)
    a = np.array([-0.1, -0.05, 0.02, 0.0])
    b, d = np.sqrt(1 - 4 * a), np.prod(1 - 4 * a) ** 0.25
    products = d**2 * np.exp(2 * w**2 @ a + w @ (b * (x + y)) - (x @ x + y @ y) / 2)
    moment = variance.log_moment_per_direction(x, y, a)
    check(products, x, y, float(second_moments.variance(moment, x, y)))
    same = variance.log_moment_per_direction(x, y, np.full(DIM, -0.1))
    general = second_moments.log_moment_generalized_exponential(x, y, -0.1)
    np.testing.assert_allclose(same, general)


@pytest.fixture(scope="module")
def orthogonal_pairs(w):
    """Pairs of Gaussian lengths in orthogonal directions, by Gram and Schmidt."""
    first, second = w[: DRAWS // 2], w[DRAWS // 2 :]
    lengths = np.linalg.norm(w, axis=-1).reshape(2, -1, 1)
    first = first / np.linalg.norm(first, axis=-1, keepdims=True)
    second = second - np.sum(first * second, -1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return lengths[1] * first, lengths[0] * second


@pytest.mark.parametrize("size, cosine", first(PAIRS))
@pytest.mark.parametrize(
    "a, s", [(0.0, 1), (0.0, -1), (-0.05, 1), (-0.03 + 0.03j, 1), (0.01 + 0.03j, -1)]
)
def test_covariance_on_orthogonal_vectors(orthogonal_pairs, size, cosine, a, s):
    x, y = pair(size, cosine)
    first, second = (
        generalized(w, x, y, a, s) / np.exp(x @ y) - 1 for w in orthogonal_pairs
    )
    expected = float(variance.orthogonal_covariance(x, y, s))
    error = np.std(first * second) / np.sqrt(len(first))
    assert abs(np.mean(first * second) - expected) < 5.5 * error + 1e-12
    if abs(expected) > 0.01:
        # Independent vectors, whose covariance is 0, would be found out.
        assert abs(expected) > 10 * error


def test_covariance_in_an_odd_dimension():
    # 1F1(-3/2; 3/2; -v) by its series.
    x, y = np.array([[0.3, 0.1, 0.0], [0.1, -0.4, 0.2]])
    v, term, total = np.sum((x + y) ** 2) / 2, 1.0, 0.0
    for k in range(40):
        total += term
        term *= (k - 1.5) / (k + 1.5) * -v / (k + 1)
    expected = np.exp(-v) * total - 1
    np.testing.assert_allclose(variance.orthogonal_covariance(x, y), expected)


def test_many_pairs_at_once():
    x, y = np.random.default_rng(0).normal(size=(2, 5, DIM)) * 0.3
    for function in (
        second_moments.generalized_exponential,
        second_moments.positive_pair,
        variance.orthogonal_covariance,
    ):
        together = function(x, y)
        assert together.shape == (5,)
        np.testing.assert_allclose(
            together, [function(a, b) for a, b in zip(x, y, strict=True)]
        )


@pytest.mark.parametrize("size, cosine", first(PAIRS))
@pytest.mark.parametrize(
    "diagonal", [np.ones(DIM), np.array([0.9, 1.1j, 1.2, 0.8j]), 1j * np.ones(DIM)]
)
def test_complex_exponential(w, size, cosine, diagonal):
    x, y = pair(size, cosine)
    u, v = diagonal * x, y / diagonal
    products = np.exp(w @ (u + v) - u @ u / 2 - v @ v / 2).real
    moment = second_moments.log_moment_complex_exponential(x, y, diagonal)
    check(products, x, y, float(second_moments.variance(moment, x, y)))
    matrix = second_moments.log_moment_complex_exponential(x, y, np.diag(diagonal))
    np.testing.assert_allclose(moment, matrix)


@pytest.mark.parametrize("size, cosine", first(PAIRS))
def test_discrete(size, cosine):
    x, y = pair(size, cosine)
    x, y = x + 0.1, y + 0.1
    generator = np.random.default_rng(0)
    counts = generator.poisson(0.3, size=(DRAWS, DIM))
    products = np.prod((x * y) ** counts * np.exp(0.3) / 0.3**counts, -1)
    moment = second_moments.log_moment_poisson(x * y, 0.3)
    check(products, x, y, float(second_moments.variance(moment, x, y)))

    from scipy import special

    counts = generator.geometric(0.7, size=(DRAWS, DIM)) - 1
    weights = special.factorial(counts) * 0.7 * 0.3**counts
    products = np.prod((x * y) ** counts / weights, -1)
    moment = second_moments.log_moment_geometric(x * y, 0.7)
    check(products, x, y, float(second_moments.variance(moment, x, y)))


def test_log_variance_where_variance_overflows():
    x = np.full(64, 2.0)
    moment = second_moments.log_moment_generalized_exponential(x, x)
    with np.errstate(over="ignore"):
        assert np.isinf(second_moments.variance(moment, x, x))
    assert np.isfinite(variance.log_variance(moment, x, x))
    small = 0.1 * x
    moment = second_moments.log_moment_generalized_exponential(small, small)
    np.testing.assert_allclose(
        np.exp(variance.log_variance(moment, small, small)),
        second_moments.generalized_exponential(small, small),
    )
    moment = second_moments.log_moment_generalized_exponential(x, x, 0, -1)
    assert variance.log_variance(moment, x, x) == -np.inf
