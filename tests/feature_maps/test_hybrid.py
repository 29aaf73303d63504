"""Hybrids: theorem 3.1 by draws, their coefficients, exactness where promised.

A map built for K heads holds K independent sets of vectors: one call gives K draws.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import feature_maps as maps
from keras_rfattn.kernels import hybrid_variance, variance
from tests import helpers as h

pytestmark = pytest.mark.once

DIM, DRAWS, M, N = 4, 100_000, 3, 2
# Of all comparisons below together, once in a million runs.
LIMIT = 5.8


def pairs(count=5, radius=None):
    generator = np.random.default_rng(0)
    x, y = 0.5 * generator.normal(size=(2, count, DIM))
    if radius is not None:
        x, y = (radius * a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, y))
    return x.astype("float32"), y.astype("float32")


def dense(features):
    values, log_scale = features
    values = 1 if values is None else h.to_numpy(values).astype("float64")
    return (values * np.exp(h.to_numpy(log_scale).astype("float64")))[0]


def estimates(feature_map, x, y, draws=DRAWS):
    """`(draws, pairs)`: one estimate of each pair from each head."""
    if not feature_map.built:
        feature_map.build((None, None, draws, DIM))
    x, y = (
        ops.convert_to_tensor(np.repeat(a[None, :, None], draws, axis=2))
        for a in (x, y)
    )
    query = dense(feature_map.query_features(x))
    key = dense(feature_map.key_features(y))
    return np.sum(query * key, -1).T


def check(found, mean, variance_):
    """Mean and variance within `LIMIT` standard errors, which detect 5 and 25 %."""
    error = np.sqrt(variance_ / len(found))
    assert np.max(LIMIT * error / np.abs(mean)) < 0.05
    assert np.all(np.abs(found.mean(0) - mean) < LIMIT * error + 1e-6)
    squares = (found - mean) ** 2
    error = squares.std(0) / np.sqrt(len(found))
    assert np.max(LIMIT * error / variance_) < 0.25
    assert np.all(np.abs(squares.mean(0) - variance_) < LIMIT * error + 1e-9)


def angular(**arguments):
    return maps.HybridAngular(M, N, projection="gaussian", seed=1, **arguments)


def gaussian(**arguments):
    return maps.HybridGaussian(
        M, N, sigma=1.5, radius=0.4, projection="gaussian", seed=2, **arguments
    )


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["angular", "gaussian"])
def test_bipolar_variance_is_theorem_3_1(kind, shared):
    x, y = pairs(radius=0.4)
    # Of unequal length, so that sharing changes the variance.
    x *= 1.3
    if kind == "angular":
        feature_map, moments = (
            angular(shared=shared),
            hybrid_variance.angular_moments(x, y, N),
        )
    else:
        feature_map = gaussian(shared=shared)
        rho = feature_map.coefficients[0].rho
        moments = hybrid_variance.gaussian_moments(x, y, N, 1.5, rho)
    found = estimates(feature_map, x, y)
    expected = hybrid_variance.bipolar_hybrid(x, y, M, moments, shared)
    check(found, np.exp(np.sum(x * y, -1)), expected)


def test_coefficients_have_their_moments():
    x, y = pairs(radius=0.7)
    gauss = maps.GaussianCoefficient(N, 0.8, 0.7, projection="gaussian", seed=4)
    for coefficient, moments in (
        (
            maps.AngularCoefficient(N, projection="gaussian", seed=3),
            hybrid_variance.angular_moments(x, y, N),
        ),
        (gauss, hybrid_variance.gaussian_moments(x, y, N, 0.8, gauss.rho)),
    ):
        found = coefficient.constant + estimates(coefficient, x, y)
        for values, expected in zip(
            (found**2, (1 - found) ** 2, found * (1 - found)), moments, strict=True
        ):
            error = values.std(0) / np.sqrt(DRAWS)
            assert np.max(LIMIT * error) < 0.1
            assert np.all(np.abs(values.mean(0) - expected) < LIMIT * error + 1e-6)
    np.testing.assert_allclose(
        hybrid_variance.angular_moments(x, y, 10**9)[0],
        (hybrid_variance.angle(x, y) / np.pi) ** 2,
        rtol=1e-6,
    )


def test_pair_coefficient_is_one_at_its_centers():
    coefficient = maps.PairCoefficient(16, tau=1.5, projection="gaussian", seed=5)
    coefficient.build((None, None, DRAWS, DIM))
    x, y = np.float32([[0.5, -0.3, 0.2, 0.4]]), np.float32([[-0.6, 0.3, -0.1, -0.5]])
    a = maps.complex_exponential.diagonal(x, y, is_real=True)
    coefficient.set_matrix(np.repeat(a, DRAWS, axis=0))
    for shift in (0, 0.5):
        z = (x + shift) * a.real + y / a.real
        expected = np.exp(-np.sum(z**2, -1) / (2 * 1.5**2))
        found = estimates(coefficient, x + np.float32(shift), y)
        error = found.std(0) / np.sqrt(DRAWS)
        assert LIMIT * error < 0.1
        assert np.all(np.abs(found.mean(0) - expected) < LIMIT * error)
    assert expected < 0.95


def test_angular_hybrid_is_exact_for_equal_and_opposite_inputs():
    x, _ = pairs(radius=1.2)
    for y in (x, -x):
        found = estimates(angular(), x, y, draws=50)
        kernel = np.exp(np.sum(x * y, -1))
        np.testing.assert_allclose(
            found, np.broadcast_to(kernel, found.shape), rtol=1e-4
        )
        moments = hybrid_variance.angular_moments(x.astype(float), y.astype(float), N)
        closed = hybrid_variance.bipolar_hybrid(x, y, M, moments)
        assert np.all(np.abs(closed) < 1e-6 * kernel**2)
    # And not because it always is.
    x, y = pairs(radius=1.2)
    assert np.min(estimates(angular(), x, y, draws=50).std(0)) > 0.01


def test_max_relative_error_on_a_sphere():
    theta, radius, m, n = np.linspace(0.01, np.pi - 0.01, 200), 1.3, 10, 4
    x = np.array([[radius, 0.0]])
    y = radius * np.stack([np.cos(theta), np.sin(theta)], -1)
    kernel = np.exp(np.sum(x * y, -1))
    trig = np.sqrt(variance.generalized_exponential(x, y, 0, -1) / m) / kernel
    plus = np.sqrt(variance.positive_pair(x, y) / m) / kernel
    np.testing.assert_allclose(
        trig, hybrid_variance.relative_error(theta, radius, m, False)
    )
    np.testing.assert_allclose(
        plus, hybrid_variance.relative_error(theta, radius, m, True)
    )
    # Lemma 3.4: the same largest error, at opposite ends.
    largest = hybrid_variance.max_relative_error(radius, m)
    assert trig.max() < largest < 1.001 * trig.max()
    assert plus.max() < largest < 1.001 * plus.max()
    # Theorem 3.5.
    moments = hybrid_variance.angular_moments(x, y, n)
    hybrid = np.sqrt(hybrid_variance.bipolar_hybrid(x, y, m, moments)) / kernel
    bound = hybrid_variance.angular_relative_error_bound(radius, m, n)
    assert 0.3 * bound < hybrid.max() < bound < largest


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
    feature_map = maps.HybridClustered(2, form="complex", seed=1)
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
    feature_map = maps.HybridClustered(
        8, form=form, num_pairs=num_pairs, projection="gaussian", seed=1
    )
    feature_map.build((None, None, draws, DIM))
    queries, keys = sample
    # Of many equal heads: the clusters of one.
    one = maps.HybridClustered(8, form=form, num_pairs=num_pairs, seed=1)
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
    feature_map = maps.HybridGaussianMixture(
        8, 4, tau=2.0, projection="gaussian", seed=1
    )
    feature_map.build((None, None, draws, DIM))
    one = maps.HybridGaussianMixture(8, 4, tau=2.0, seed=1)
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


def test_a_hybrid_may_hold_a_hybrid():
    x, y = pairs(radius=0.7)
    nested = maps.Hybrid(
        ["favorplus", angular()], [maps.AngularCoefficient(N, seed=0)], seed=9
    )
    nested = maps.get(maps.serialize(nested))
    found = estimates(nested, x, y, draws=400)
    kernel = np.exp(np.sum(x * y, -1))
    error = found.std(0) / np.sqrt(len(found))
    assert np.max(LIMIT * error / kernel) < 0.2
    assert np.all(np.abs(found.mean(0) - kernel) < LIMIT * error)
    one = ops.convert_to_tensor(np.repeat(x[None, :1, None], 400, axis=2))
    assert nested.key_features(one).log_scale.shape[-1] == nested.output_dim


def test_parts_have_seeds_of_their_own():
    hybrid = maps.HybridAngular(4, 3, shared=False, seed=5)
    hybrid.build((None, None, 1, DIM))
    plus, trig = (h.to_numpy(e.vectors) for e in hybrid.estimators)
    assert not np.any(plus == trig)
    shared = maps.HybridAngular(4, 3, shared=True, seed=5)
    shared.build((None, None, 1, DIM))
    h.assert_same(shared.estimators[0].vectors, shared.estimators[1].vectors)
    shared.redraw()
    h.assert_same(shared.estimators[0].vectors, shared.estimators[1].vectors)
    assert not np.any(h.to_numpy(shared.estimators[0].vectors) == plus)
    other = hybrid.reseeded(6)
    other.build((None, None, 1, DIM))
    assert not np.any(h.to_numpy(other.estimators[0].vectors) == plus)
    again = hybrid.reseeded(5)
    again.build((None, None, 1, DIM))
    h.assert_same(again.estimators[0].vectors, plus)


def test_errors():
    with pytest.raises(ValueError, match="one more than `coefficients`"):
        maps.Hybrid(["favor"], [maps.AngularCoefficient(2)])
    with pytest.raises(ValueError, match="softmax estimators"):
        maps.Hybrid(["favor", "elu"], [maps.AngularCoefficient(2)])
    with pytest.raises(ValueError, match="`sigma` and `radius` must be positive"):
        maps.HybridGaussian(sigma=0.0)
    with pytest.raises(ValueError, match="`num_clusters` must be two positive"):
        maps.HybridClustered(num_clusters=(2, 0))
    with pytest.raises(ValueError, match="`num_pairs` from 1 to 4"):
        maps.HybridClustered(num_pairs=5)
    with pytest.raises(ValueError, match="`tau` must be positive"):
        maps.PairCoefficient(tau=-1)
    feature_map = maps.HybridClustered(2, num_clusters=(9, 2))
    feature_map.build((None, None, 1, DIM))
    with pytest.raises(ValueError, match="9 clusters need as many tokens"):
        feature_map.adapt([(np.zeros((1, 4, DIM)), np.zeros((1, 4, DIM)))])
    with pytest.raises(ValueError, match="cannot adapt"):
        feature_map.adapt([])
    with pytest.raises(ValueError, match="cannot adapt"):
        maps.HybridAngular(2, 2).adapt([(np.zeros((1, 4, DIM)),) * 2])


def linear_model(feature_map, seed):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs))
    return keras_rfattn.replace_attention(model, feature_map, seed=seed)


@pytest.mark.filterwarnings("ignore:.* are not normalized:UserWarning")
@pytest.mark.parametrize(
    "feature_map",
    [
        maps.Conditioned(maps.Gerf(3, seed=5)),
        maps.Hybrid(["favor", "favorplus"], [maps.AngularCoefficient(2, seed=1)]),
    ],
    ids=["conditioned", "hybrid"],
)
def test_weights_of_maps_inside_maps_load_whatever_the_seed(feature_map, tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
    one, other = linear_model(feature_map, 1), linear_model(feature_map, 2)
    path = str(tmp_path / "a.weights.h5")
    one.save_weights(path)
    assert np.any(h.to_numpy(one(x)) != h.to_numpy(other(x)))
    other.load_weights(path)
    h.assert_same(other(x), one(x))
    with pytest.raises(ValueError, match="saved from another one|not be loaded"):
        linear_model("favor", 1).load_weights(path)


@pytest.mark.filterwarnings("ignore:.* are not normalized:UserWarning")
def test_hybrids_learn_and_save_together(tmp_path):
    hybrid = maps.Hybrid(
        [maps.HybridClustered(3), maps.Gerf(3), maps.Favor(3)],
        [maps.AngularCoefficient(2), maps.GaussianCoefficient(2)],
    )
    model = linear_model(hybrid, 0)
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
    before = model.predict(x, verbose=0)
    keras_rfattn.calibrate(model, [x])
    model.predict_function = None
    after = model.predict(x, verbose=0)
    assert np.any(after != before)
    path = str(tmp_path / "model.keras")
    model.save(path)
    h.assert_same(keras.saving.load_model(path).predict(x, verbose=0), after)


SOME = 20_000
MATRIX = np.random.default_rng(9).normal(size=(DIM, DIM)) / 2


def coefficient(feature_map, matrix=None, seed=3):
    return maps.KernelCoefficient(
        feature_map, matrix, width=1.3, constant=0.9, factor=-0.7, seed=seed
    )


def base(cls, **arguments):
    return cls(N, projection="gaussian", seed=0, **arguments)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("matrix", [None, MATRIX])
@pytest.mark.parametrize("cls", [maps.FavorPlus, maps.Favor, maps.HybridAngular])
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
        (maps.Favor, True, False),
        (maps.FavorPlus, False, True),
        (maps.HybridAngular, True, True),
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
    parts = [base(maps.FavorPlus, pair=True), base(maps.Favor)]
    nested = coefficient(base(maps.HybridAngular), MATRIX)
    hybrid = maps.Hybrid(parts, [nested], seed=5)
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
        ({"factor": 0}, "`factor` not 0"),
        ({"matrix": np.eye(3)[:2]}, r"shape \(H, H\)"),
    ],
)
def test_wrong_kernel_coefficients_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        maps.KernelCoefficient(**arguments)
    with pytest.raises(ValueError, match="`matrix` must have shape"):
        maps.KernelCoefficient(matrix=np.eye(3)).build((None, None, 2, DIM))
