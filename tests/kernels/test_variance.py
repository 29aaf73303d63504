"""The oracle itself, against NumPy draws that use no other part of the library."""

import numpy as np
import pytest

from keras_rfattn.kernels import variance

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


@pytest.mark.parametrize("size, cosine", PAIRS)
@pytest.mark.parametrize(
    "a, s", [(0.0, 1), (0.0, -1), (-0.03, 1), (-0.1, 1), (0.02 + 0.05j, -1)]
)
def test_generalized_exponential(w, size, cosine, a, s):
    x, y = pair(size, cosine)
    expected = float(variance.generalized_exponential(x, y, a, s))
    check(generalized(w, x, y, a, s), x, y, expected)


@pytest.mark.parametrize("size, cosine", PAIRS)
def test_positive_pair(w, size, cosine):
    x, y = pair(size, cosine)
    products = np.cosh(w @ (x + y)) * np.exp(-(x @ x + y @ y) / 2)
    check(products, x, y, float(variance.positive_pair(x, y)))


def test_many_pairs_at_once():
    x, y = np.random.default_rng(0).normal(size=(2, 5, DIM)) * 0.3
    for function in (variance.generalized_exponential, variance.positive_pair):
        together = function(x, y)
        assert together.shape == (5,)
        np.testing.assert_allclose(
            together, [function(a, b) for a, b in zip(x, y, strict=True)]
        )
