"""Means and variances of the estimators against their closed forms.

With m vectors, m times the product of one feature of x and of y is one draw of the
estimator: a map of many features is a sample. Seeds are fixed; the bands are those
that a correct map would leave once in a million runs.
"""

import statistics

import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps import fits
from keras_rfattn.papers import second_moments
from tests import helpers as h
from tests.feature_maps.cases import DIM, case
from tests.marks import each_map

pytestmark = pytest.mark.once

DRAWS = 400_000


def pairs():
    """`(x, y)` of every angle, near and far."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 6, DIM))
    x *= 0.5 / np.linalg.norm(x, axis=-1, keepdims=True)
    y *= np.linspace(0.2, 0.6, 6)[:, None] / np.linalg.norm(y, axis=-1, keepdims=True)
    y[0], y[1] = x[0], -x[1]
    return x, y


X, Y = pairs()
KERNEL = np.exp(np.sum(X * Y, -1))
SOFTMAX = [name for name in h.RANDOM if name in h.names(kernel="softmax")]
ESTIMATORS = [(name, label) for name in SOFTMAX for label in case(name).estimators]
PROJECTED = [
    (name, label)
    for name, label in ESTIMATORS
    if issubclass(feature_maps.class_of(name), feature_maps.ProjectedFeatureMap)
]
LIMIT = statistics.NormalDist().inv_cdf(1 - 1e-6 / (2 * len(ESTIMATORS) * len(X)))


def dense(features):
    """`(pairs, M)` of float64 from `(1, pairs, 1, M)`."""
    features = features.dense()
    parts = features.ones_or_values(), features.log_scale
    value, log_scale = (h.to_numpy(part)[0, :, 0].astype("float64") for part in parts)
    return np.exp(log_scale) * value


def sample(name, label, **arguments):
    """Draws of the estimator, `(pairs, DRAWS)` in float64, and their variance."""
    estimator = case(name).estimators[label]
    feature_map = feature_maps.get(
        name, num_features=DRAWS, seed=3, **arguments, **estimator.arguments
    )
    feature_map.build((None, None, 1, DIM))
    for weight, value in estimator.weights.items():
        getattr(feature_map, weight).assign(np.float32([value]))
    if estimator.a is not None:
        feature_map.a.assign(np.full(feature_map.a.shape, estimator.a))
    log_moment = feature_map.log_moment(0)
    if log_moment is None:
        pytest.skip(f"{name} states no second moment")
    x, y = (ops.convert_to_tensor(a[None, :, None].astype("float32")) for a in (X, Y))
    query = dense(feature_map.query_features(x))
    products = DRAWS * query * dense(feature_map.key_features(y))
    # Two features a vector, side by side: their sum is the draw.
    draws = products.reshape(len(X), -1, DRAWS).sum(axis=1)
    return draws, second_moments.variance(log_moment(X, Y), X, Y)


@pytest.mark.parametrize(("name", "label"), each_map(ESTIMATORS))
def test_independent_vectors(name, label):
    gaussian = {"projection": "gaussian"} if (name, label) in PROJECTED else {}
    draws, expected = sample(name, label, **gaussian)
    error = np.sqrt(expected / DRAWS)
    assert np.max(LIMIT * error / KERNEL) < 0.02
    # Float32 features of a variance that is zero (x = -y) still round.
    assert np.all(np.abs(draws.mean(1) - KERNEL) < LIMIT * error + 1e-6)

    squares = (draws - KERNEL[:, None]) ** 2
    error = squares.std(axis=1) / np.sqrt(DRAWS)
    some = expected > 1e-6
    assert np.sum(some) >= 5
    assert np.max(LIMIT * error[some] / expected[some]) < 0.1
    assert np.all(np.abs(squares.mean(1) - expected) < LIMIT * error + 1e-9)


def test_closed_forms_are_stated():
    # Else the test above could skip them all.
    stated = {name for name, label in ESTIMATORS if states_moment(name, label)}
    assert len(stated) >= 9


def states_moment(name, label):
    estimator = case(name).estimators[label]
    feature_map = feature_maps.get(name, num_features=4, seed=0, **estimator.arguments)
    feature_map.build((None, None, 1, DIM))
    return feature_map.log_moment(0) is not None


# Estimators that are even in the projection, where orthogonality shows at once.
EVEN = [("favor", "")]


@pytest.mark.parametrize(("name", "label"), each_map(PROJECTED))
def test_orthogonal_vectors(name, label):
    draws, independent = sample(name, label, projection="orthogonal")
    # Vectors of a block depend on each other; blocks do not.
    blocks = draws.reshape(len(X), -1, DIM).mean(axis=-1)
    count = blocks.shape[1]
    error = np.sqrt(independent / DRAWS)
    assert np.max(LIMIT * error / KERNEL) < 0.02
    assert np.all(np.abs(blocks.mean(1) - KERNEL) < LIMIT * error + 1e-6)

    squares = DIM * (blocks - KERNEL[:, None]) ** 2
    error = squares.std(axis=1) / np.sqrt(count)
    assert np.all(squares.mean(1) < independent + LIMIT * error + 1e-9)
    if (name, label) in EVEN:
        some = independent > 1e-6
        gain = independent - squares.mean(1)
        assert np.all(gain[some] > LIMIT * error[some])


def test_negative_control_a_wrong_factor_is_found_out():
    # Queries scaled twice: another temperature.
    draws, expected = sample("favorplus", "", projection="gaussian")
    error = np.sqrt(expected / DRAWS)
    wrong = np.exp(2 * np.log(KERNEL))
    assert np.any(np.abs(draws.mean(1) - wrong) > 10 * LIMIT * error)


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("z", [0.01, 0.5, 3.0, 20.0])
def test_optimal_a_is_the_minimum_of_the_closed_form(z, dim):
    from scipy import optimize

    # Of a pair the variance depends on A through ‖x + y‖² alone.
    x = np.zeros(dim)
    x[0] = np.sqrt(z) / 2

    def cost(a):
        return np.log(
            second_moments.generalized_exponential(x, x, a) + np.exp(2 * np.sum(x * x))
        )

    found = optimize.minimize_scalar(
        cost, bounds=(-20, 0), method="bounded", options={"xatol": 1e-10}
    )
    a = float(h.to_numpy(fits.best_a(ops.convert_to_tensor(np.float32(z)), dim)))
    assert a < 0
    np.testing.assert_allclose(a, found.x, rtol=1e-3, atol=1e-6)
    assert cost(a) <= found.fun + 1e-6


def test_optimal_a_is_finite_and_vanishes_with_z():
    z = np.float32([0, 1e-30, 1e-8, 1e-3, 1.0, 1e3, 1e6])
    a = h.to_numpy(fits.best_a(ops.convert_to_tensor(z), 16))
    assert np.all(np.isfinite(a)) and np.all(a <= 0)
    np.testing.assert_allclose(a[:3], 0, atol=1e-6)
    assert np.all(np.diff(a[3:]) < 0)


def test_elu_is_its_kernel():
    x = h.problem(size=2.0)
    feature_map = h.build("elu")
    query, key = h.featurize(feature_map, x.query[:, :, ::2], x.key)
    products = np.einsum(
        "btkm,bskm->bkts",
        np.exp(h.to_numpy(query.log_scale).astype("float64")),
        np.exp(h.to_numpy(key.log_scale).astype("float64")),
    )
    sides = (y.transpose(0, 2, 1, 3) for y in (x.query[:, :, ::2], x.key))
    q, k = (np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in sides)
    expected = q @ k.swapaxes(-1, -2)
    h.assert_close(products, expected, 1e-6)


def arc_cosine(x, y):
    """The mean over w of a product: that of `relu(w · x)` and `relu(w · y)`.

    Cho and Saul, "Kernel Methods for Deep Learning" (2009), equation 3, halved, because
    the paper's kernels are twice the mean.
    """
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    cosine = np.clip(np.sum(x * y, axis=-1) / lengths, -1, 1)
    angle = np.arccos(cosine)
    return lengths * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
def test_relu_is_the_arc_cosine_kernel_and_epsilon(projection):
    feature_map = feature_maps.get(
        "relu", num_features=DRAWS, projection=projection, seed=3
    )
    feature_map.build((None, None, 1, DIM))

    def dense(x):
        x = ops.convert_to_tensor(x[None, :, None].astype("float32"))
        scale = feature_map.key_features(x).log_scale
        return np.exp(h.to_numpy(scale)[0, :, 0].astype("float64"))

    # The constant of the paper's code, where w · x is negative.
    epsilon = 1e-3
    least = np.sqrt(DRAWS) * dense(X).min(axis=1)
    np.testing.assert_allclose(least, epsilon, rtol=1e-5)
    blocks = DRAWS * dense(X) * dense(Y)
    blocks = blocks.reshape(len(X), -1, DIM).mean(axis=-1)
    error = blocks.std(axis=1) / np.sqrt(blocks.shape[1])
    kernel = arc_cosine(X, Y)
    # E relu(w · x) = ‖x‖ / √(2π), which epsilon is multiplied by.
    lengths = np.linalg.norm(X, axis=-1) + np.linalg.norm(Y, axis=-1)
    expected = kernel + epsilon * lengths / np.sqrt(2 * np.pi) + epsilon**2
    usual = kernel > 1e-3
    assert np.max(LIMIT * error[usual] / expected[usual]) < 0.06
    assert np.all(np.abs(blocks.mean(1) - expected) < LIMIT * error + 1e-9)
