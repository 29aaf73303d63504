import numpy as np
import pytest

from keras_rfattn.kernels import values
from tests import helpers as h

pytestmark = pytest.mark.once

X, Y = np.random.default_rng(0).normal(size=(2, 2, 3, 4)) * 0.7


def test_softmax_and_gaussian_differ_by_the_norms():
    xx, yy = np.sum(X**2, -1)[..., :, None], np.sum(Y**2, -1)[..., None, :]
    h.assert_close(
        values.softmax(X, Y),
        np.exp(xx / 2) * values.gaussian(X, Y) * np.exp(yy / 2),
        1e-12,
    )
    difference = X[:, :, None] - Y[:, None]
    h.assert_close(values.gaussian(X, Y), np.exp(-np.sum(difference**2, -1) / 2), 1e-12)


def test_relu_is_the_mean_over_directions():
    w = np.random.default_rng(1).normal(size=(400_000, 4))
    x, y = np.maximum(X[0] @ w.T, 0), np.maximum(Y[0] @ w.T, 0)
    products = x[:, None] * y[None]
    error = products.std(-1) / np.sqrt(len(w))
    assert np.max(4.9 * error / values.relu(X[0], Y[0])) < 0.2
    assert np.max(np.abs(products.mean(-1) - values.relu(X[0], Y[0])) / error) < 5.5


def test_relu_of_equal_and_opposite_vectors():
    x = np.array([[3.0, 4.0]])
    np.testing.assert_allclose(values.relu(x, x), 25 / 2)
    np.testing.assert_allclose(values.relu(x, -x), 0, atol=1e-12)


@pytest.mark.parametrize("x, y, expected", [(0.0, 0.0, 1), (2.0, -1.0, 3 / np.e)])
def test_elu(x, y, expected):
    np.testing.assert_allclose(values.elu(np.array([[x]]), np.array([[y]])), expected)
