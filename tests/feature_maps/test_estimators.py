"""Means and variances of the estimators against their closed forms.

With m vectors, m times the product of one feature of x and of y is one draw of the
estimator: a map of many features is a sample. Seeds are fixed; the bands are those
that a correct map would leave once in a million runs.
"""

import statistics
from typing import NamedTuple

import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.kernels import exact
from keras_rfattn.kernels import hybrid_variance
from keras_rfattn.kernels import variance
from tests import helpers as h

DIM, DRAWS = 4, 400_000


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
# Real, imaginary and full A of complex exponential features.
SIZES_OF_A = np.array([0.8, 1.1, 0.9, 1.2])
COMPLEX_A = SIZES_OF_A * np.array([1, 1j, 1, 1j])
FULL_A = np.eye(DIM) + 0.2 * np.sin(np.arange(DIM * DIM).reshape(DIM, DIM))
SHIFT = np.full(DIM, -0.7)


def moment(name, *arguments):
    """One-draw variance from a second moment."""
    log_moment = getattr(variance, f"log_moment_{name}")(*arguments)
    return variance.variance(log_moment, X, Y)


def shifted(name, parameter):
    log_moment = getattr(variance, f"log_moment_{name}")
    log_moment = log_moment((X - SHIFT) * (Y - SHIFT), parameter)
    return moment("shifted", log_moment, X, Y, SHIFT)


def hybrid(moments, m=8, shared=True):
    return m * hybrid_variance.bipolar_hybrid(X, Y, m, moments, shared)


class Estimator(NamedTuple):
    """A map, its constructor arguments, and the one-draw variance it should have."""

    name: str
    arguments: dict
    variance: np.ndarray
    stats: float | None = None
    # Assigned after building: weight name -> value of one head.
    weights: dict = {}


def stacked(a):
    return np.stack([np.real(a), np.imag(a)])


ESTIMATORS = {
    "favor": Estimator("favor", {}, variance.generalized_exponential(X, Y, 0, -1)),
    "favorplus": Estimator("favorplus", {}, variance.generalized_exponential(X, Y)),
    "pair": Estimator("favorplus", {"pair": True}, variance.positive_pair(X, Y)),
    "favorpp at 0": Estimator(
        "favorpp", {}, variance.generalized_exponential(X, Y), stats=0.0
    ),
    "favorpp": Estimator(
        "favorpp", {}, variance.generalized_exponential(X, Y, -0.1), stats=-0.1
    ),
    "gerf": Estimator(
        "gerf", {}, variance.generalized_exponential(X, Y, -0.05 + 0.08j, -1),
        weights={"parameters": [-0.05, 0.08, -1]},
    ),
    "gerf +": Estimator(
        "gerf", {}, variance.generalized_exponential(X, Y, -0.05 + 0.08j, 1),
        weights={"parameters": [-0.05, 0.08, 1]},
    ),
    "poisson": Estimator(
        "poisson", {"parameter": 0.15}, moment("poisson", X * Y, 0.15)
    ),
    "geometric": Estimator(
        "geometric", {"parameter": 0.85}, moment("geometric", X * Y, 0.85)
    ),
    "poisson_positive": Estimator(
        "poisson_positive", {"parameter": 1.0}, shifted("poisson", 1.0),
        weights={"shift": SHIFT},
    ),
    "geometric_positive": Estimator(
        "geometric_positive", {"parameter": 0.6}, shifted("geometric", 0.6),
        weights={"shift": SHIFT},
    ),
    "complex": Estimator(
        "complex_exponential", {},
        moment("complex_exponential", X, Y, COMPLEX_A),
        weights={"matrix": stacked(COMPLEX_A)},
    ),
    "real": Estimator(
        "complex_exponential", {"form": "real"},
        moment("complex_exponential", X, Y, SIZES_OF_A),
        weights={"matrix": stacked(SIZES_OF_A)},
    ),
    "full": Estimator(
        "complex_exponential", {"form": "full"},
        moment("complex_exponential", X, Y, FULL_A),
        weights={"matrix": FULL_A, "inverse": np.linalg.inv(FULL_A).T},
    ),
}  # fmt: skip
LIMIT = statistics.NormalDist().inv_cdf(1 - 1e-6 / (2 * len(ESTIMATORS) * len(X)))


def dense(features):
    """`(pairs, M)` of float64 from `(1, pairs, 1, M)`."""
    values, log_scale = (
        None if part is None else h.to_numpy(part)[0, :, 0].astype("float64")
        for part in features
    )
    return np.exp(log_scale) * (1 if values is None else values)


def sample(label, projection):
    """Draws of the estimator, `(pairs, DRAWS)` in float64."""
    estimator = ESTIMATORS[label]
    arguments = {"projection": projection, **estimator.arguments}
    if "parameter" in arguments:
        del arguments["projection"]
    feature_map = feature_maps.get(
        estimator.name, num_features=DRAWS, seed=3, **arguments
    )
    feature_map.build((None, None, 1, DIM))
    for name, value in estimator.weights.items():
        getattr(feature_map, name).assign(np.float32([value]))
    stats = None
    if estimator.stats is not None:
        stats = ops.convert_to_tensor(np.float32([estimator.stats]))
    x, y = (ops.convert_to_tensor(a[None, :, None].astype("float32")) for a in (X, Y))
    query = dense(feature_map.query_features(x, stats))
    products = DRAWS * query * dense(feature_map.key_features(y, stats))
    # Two features a vector, side by side: their sum is the draw.
    return products.reshape(len(X), -1, DRAWS).sum(axis=1)


def test_every_estimator_of_the_registry_is_here():
    named = {estimator.name for estimator in ESTIMATORS.values()}
    # Those of many draws each are in test_hybrid.py and test_conditioned.py.
    named |= {n for n in h.NAMES if n.startswith("hybrid")} | {"favorpp_dense"}
    expected = {
        n for n in h.NAMES if h.build(n).is_unbiased and h.build(n).kernel == "softmax"
    }
    assert named == expected


@pytest.mark.parametrize("label", ESTIMATORS)
def test_independent_vectors(label):
    draws, expected = sample(label, "gaussian"), ESTIMATORS[label].variance
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


CONTINUOUS = [k for k, e in ESTIMATORS.items() if "parameter" not in e.arguments]


@pytest.mark.parametrize("label", CONTINUOUS)
def test_orthogonal_vectors(label):
    draws, independent = sample(label, "orthogonal"), ESTIMATORS[label].variance
    # Vectors of a block depend on each other; blocks do not.
    blocks = draws.reshape(len(X), -1, DIM).mean(axis=-1)
    count = blocks.shape[1]
    error = np.sqrt(independent / DRAWS)
    assert np.max(LIMIT * error / KERNEL) < 0.02
    assert np.all(np.abs(blocks.mean(1) - KERNEL) < LIMIT * error + 1e-6)

    squares = DIM * (blocks - KERNEL[:, None]) ** 2
    error = squares.std(axis=1) / np.sqrt(count)
    assert np.all(squares.mean(1) < independent + LIMIT * error + 1e-9)
    if label in ("favor", "pair"):
        # Even functions of the projection: here orthogonality shows at once.
        some = independent > 1e-6
        gain = independent - squares.mean(1)
        assert np.all(gain[some] > LIMIT * error[some])


def test_negative_control_a_wrong_factor_is_found_out():
    # Queries scaled twice: another temperature.
    draws, expected = sample("favorplus", "gaussian"), ESTIMATORS["favorplus"].variance
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
            variance.generalized_exponential(x, x, a) + np.exp(2 * np.sum(x * x))
        )

    found = optimize.minimize_scalar(
        cost, bounds=(-20, 0), method="bounded", options={"xatol": 1e-10}
    )
    feature_map = feature_maps.get("favorpp", num_features=2)
    feature_map.build((None, None, 1, dim))
    a = float(h.to_numpy(feature_map.optimal_a(ops.convert_to_tensor(np.float32(z)))))
    assert a < 0
    np.testing.assert_allclose(a, found.x, rtol=1e-3, atol=1e-6)
    assert cost(a) <= found.fun + 1e-6


def test_optimal_a_is_finite_and_vanishes_with_z():
    feature_map = feature_maps.get("favorpp", num_features=2)
    feature_map.build((None, None, 1, 16))
    z = np.float32([0, 1e-30, 1e-8, 1e-3, 1.0, 1e3, 1e6])
    a = h.to_numpy(feature_map.optimal_a(ops.convert_to_tensor(z)))
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
    expected = exact.elu(
        x.query[:, :, ::2].transpose(0, 2, 1, 3), x.key.transpose(0, 2, 1, 3)
    )
    h.assert_close(products, expected, 1e-6)


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("epsilon", [1e-3, 0.5])
def test_relu_is_the_arc_cosine_kernel_and_epsilon(projection, epsilon):
    feature_map = feature_maps.get(
        "relu", num_features=DRAWS, projection=projection, seed=3, epsilon=epsilon
    )
    feature_map.build((None, None, 1, DIM))

    def dense(x):
        x = ops.convert_to_tensor(x[None, :, None].astype("float32"))
        scale = feature_map.key_features(x).log_scale
        return np.exp(h.to_numpy(scale)[0, :, 0].astype("float64"))

    blocks = DRAWS * dense(X) * dense(Y)
    blocks = blocks.reshape(len(X), -1, DIM).mean(axis=-1)
    error = blocks.std(axis=1) / np.sqrt(blocks.shape[1])
    kernel = np.diagonal(exact.relu(X, Y))
    # E relu(w · x) = ‖x‖ / √(2π), which epsilon is multiplied by.
    lengths = np.linalg.norm(X, axis=-1) + np.linalg.norm(Y, axis=-1)
    expected = kernel + epsilon * lengths / np.sqrt(2 * np.pi) + epsilon**2
    usual = kernel > 1e-3
    assert np.max(LIMIT * error[usual] / expected[usual]) < 0.06
    assert np.all(np.abs(blocks.mean(1) - expected) < LIMIT * error + 1e-9)
