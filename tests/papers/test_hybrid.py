"""Hybrids: theorem 3.1 by draws, their coefficients, exactness where promised.

A map built for K heads holds K independent sets of vectors: one call gives K draws.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import feature_maps as maps
from keras_rfattn import papers
from keras_rfattn.diagnostics import errors
from keras_rfattn.papers import hybrid_variance, second_moments
from tests import helpers as h
from tests.feature_maps.draws import DIM, DRAWS, LIMIT, check, dense, estimates, pairs
from tests.marks import slow_on_jax

pytestmark = pytest.mark.once

M, N = 3, 2


def angular(**arguments):
    return papers.HybridAngular(M, N, projection="gaussian", seed=1, **arguments)


def gaussian(**arguments):
    return papers.HybridGaussian(
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
    gauss = papers.GaussianCoefficient(N, 0.8, 0.7, projection="gaussian", seed=4)
    for coefficient, moments in (
        (
            papers.AngularCoefficient(N, projection="gaussian", seed=3),
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
    trig = np.sqrt(second_moments.generalized_exponential(x, y, 0, -1) / m) / kernel
    plus = np.sqrt(second_moments.positive_pair(x, y) / m) / kernel
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


@slow_on_jax
def test_a_hybrid_may_hold_a_hybrid():
    x, y = pairs(radius=0.7)
    nested = papers.Hybrid(
        ["favorplus", angular()], [papers.AngularCoefficient(N, seed=0)], seed=9
    )
    nested = maps.get(maps.serialize(nested))
    found = estimates(nested, x, y, draws=400)
    kernel = np.exp(np.sum(x * y, -1))
    error = found.std(0) / np.sqrt(len(found))
    assert np.max(LIMIT * error / kernel) < 0.2
    assert np.all(np.abs(found.mean(0) - kernel) < LIMIT * error)
    one = ops.convert_to_tensor(np.repeat(x[None, :1, None], 400, axis=2))
    assert nested.key_features(one).log_scale.shape[-1] == nested.output_dim


def test_pair_has_both_signs_of_the_vectors_of_its_seed():
    pair, plus = papers.FavorPlusPair(M, seed=6), maps.FavorPlus(M, seed=6)
    pair = maps.deserialize(maps.serialize(pair))
    for feature_map in (pair, plus):
        feature_map.build((None, None, 2, DIM))
    for _ in range(2):
        vectors = h.to_numpy(plus.vectors)
        h.assert_same(pair.vectors, np.concatenate([vectors, -vectors], axis=-1))
        for feature_map in (pair, plus):
            feature_map.redraw()
        assert not np.any(h.to_numpy(plus.vectors) == vectors)
    assert pair.output_dim == 2 * M


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
def test_pair_has_the_mean_and_variance_of_its_closed_form(projection):
    x, y = pairs(radius=0.5)
    feature_map = papers.FavorPlusPair(M, projection=projection, seed=7)
    kernel = np.exp(np.sum(x * y, -1))
    found = estimates(feature_map, x, y, draws=50_000)
    predicted = errors.predicted_variance(feature_map, 0)(x, y) * kernel**2
    check(found, kernel, predicted)
    independent = second_moments.positive_pair(x, y) / M
    is_independent = np.allclose(predicted, independent, rtol=1e-4)
    assert is_independent == (projection == "gaussian")


@pytest.mark.parametrize("causal", [False, True])
def test_parts_that_measure_the_sequence_are_bound_to_it(causal):
    generator = np.random.default_rng(0)
    query, key = generator.normal(0.3, 0.8, size=(2, 1, 9, 2, DIM)).astype("float32")
    mask, side = np.arange(9)[None] < 7, np.float32(0.7)
    coefficient = papers.KernelCoefficient(
        maps.FavorPP(4), np.diag([0.5, -1, 0.8, -0.6]), width=1.4, constant=0.2
    )
    parts = papers.Hybrid([maps.FavorPP(3), papers.Favor(3)], [coefficient], seed=2)
    hybrid = papers.Hybrid([parts, "favorplus"], [papers.AngularCoefficient(2)], seed=3)
    hybrid.build((None, None, 2, DIM))
    assert hybrid.measures_sequence
    bound = hybrid.bind(query, key, side, mask, mask, causal=causal)
    found = [dense(bound.query_features(query)), dense(bound.key_features(key))]

    def unbound():
        features = hybrid.query_features(side * query), hybrid.key_features(side * key)
        return [dense(x) for x in features]

    # Unbound and uncalibrated, every A is 0.
    for x, y in zip(found, unbound(), strict=True):
        assert np.allclose(x, y, rtol=1e-4) == causal
    hybrid.adapt([tuple(side * x[0, :7].swapaxes(0, 1) for x in (query, key))])
    for x, y in zip(found, unbound(), strict=True):
        assert np.allclose(x, y, rtol=1e-4) != causal


def vectors_of(hybrid):
    """The vectors of both estimators of a bipolar hybrid: w of the pairs ±w, and w."""
    pair, trigonometric = (h.to_numpy(e.vectors) for e in hybrid.estimators)
    return pair[:, 0, :, : trigonometric.shape[-1]], trigonometric


def test_parts_have_seeds_of_their_own():
    hybrid = papers.HybridAngular(4, 3, shared=False, seed=5)
    hybrid.build((None, None, 1, DIM))
    plus, trig = vectors_of(hybrid)
    assert not np.any(plus == trig)
    shared = papers.HybridAngular(4, 3, shared=True, seed=5)
    shared.build((None, None, 1, DIM))
    h.assert_same(*vectors_of(shared))
    shared.redraw()
    h.assert_same(*vectors_of(shared))
    assert not np.any(vectors_of(shared)[0] == plus)
    other = hybrid.reseeded(6)
    other.build((None, None, 1, DIM))
    assert not np.any(vectors_of(other)[0] == plus)
    again = hybrid.reseeded(5)
    again.build((None, None, 1, DIM))
    h.assert_same(vectors_of(again)[0], plus)


def test_errors():
    with pytest.raises(ValueError, match="one more than `coefficients`"):
        papers.Hybrid(["favor"], [papers.AngularCoefficient(2)])
    with pytest.raises(ValueError, match="softmax estimators"):
        papers.Hybrid(["favor", "elu"], [papers.AngularCoefficient(2)])
    with pytest.raises(ValueError, match="`sigma` and `radius` must be positive"):
        papers.HybridGaussian(sigma=0.0)
    with pytest.raises(ValueError, match="cannot adapt"):
        papers.HybridAngular(2, 2).adapt([(np.zeros((1, 4, DIM)),) * 2])


def linear_model(feature_map, seed):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs))
    return keras_rfattn.replace_attention(model, feature_map, seed=seed)


@pytest.mark.parametrize(
    "feature_map",
    [
        papers.Hybrid(["favor", "favorplus"], [papers.KernelCoefficient("favor")]),
        papers.Hybrid(["favor", "favorplus"], [papers.AngularCoefficient(2, seed=1)]),
    ],
    ids=["of a coefficient of a map", "hybrid"],
)
def test_weights_of_maps_inside_maps_load_whatever_the_seed(feature_map, tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
    one, other = linear_model(feature_map, 1), linear_model(feature_map, 2)
    path = str(tmp_path / "a.weights.h5")
    one.save_weights(path)
    one, another = h.forward(one), h.forward(other)
    assert np.any(h.to_numpy(one(x)) != h.to_numpy(another(x)))
    other.load_weights(path)
    h.assert_same(another(x), one(x))
    with pytest.raises(ValueError, match="saved with another mech|not be loaded"):
        linear_model("favor", 1).load_weights(path)


@slow_on_jax
def test_hybrids_learn_and_save_together(tmp_path):
    hybrid = papers.Hybrid(
        [papers.HybridClustered(3), papers.Gerf(3), papers.Favor(3)],
        [papers.AngularCoefficient(2), papers.GaussianCoefficient(2)],
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
