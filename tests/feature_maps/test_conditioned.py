"""Conditioning keeps softmax and places queries and keys better."""

import keras
import numpy as np
import pytest
from keras import ops
from keras_rfattn.feature_maps.stateless import essence

import keras_rfattn
from keras_rfattn import feature_maps as maps
from keras_rfattn.feature_maps import moments
from keras_rfattn.ops.layout import heads_first
from tests import helpers as h
from tests.marks import slow_on_jax

pytestmark = pytest.mark.once

DIM, HEADS, DRAWS = 6, 2, 40


def data(length=200, heads=HEADS):
    """Queries and keys off center, of very different covariances."""
    generator = np.random.default_rng(0)
    mix = 0.4 * generator.normal(size=(2, DIM, DIM)) * np.linspace(0.3, 1.5, DIM)
    mix[1] = mix[1][:, ::-1]
    centers = generator.normal(size=(2, 1, DIM))
    tokens = generator.normal(size=(2, heads, length, DIM))
    return tuple(
        0.5 * (t @ m + c) for t, m, c in zip(tokens, mix, centers, strict=True)
    )


def adapted(feature_map, sample):
    feature_map.build((None, None, sample[0].shape[0], DIM))
    feature_map.adapt([sample])
    return feature_map


def kernel(feature_map, sample):
    """Estimates `(K, T, S)` in float64."""
    query, key = (
        ops.convert_to_tensor(x.swapaxes(0, 1)[None].astype("float32")) for x in sample
    )
    stats = feature_map.statistics(query, key, causal=True)

    def dense(features):
        values, scale = (None if x is None else h.to_numpy(x)[0] for x in features)
        values = 1 if values is None else values
        return (values * np.exp(scale.astype("float64"))).swapaxes(0, 1)

    return dense(feature_map.query_features(query, stats)) @ dense(
        feature_map.key_features(key, stats)
    ).swapaxes(-1, -2)


@pytest.mark.parametrize("up_to", ["center", "balance", "rotate"])
@pytest.mark.parametrize("inner", ["favor", "favorpp", "poisson", "hybrid_angular"])
def test_estimates_the_softmax_kernel_of_the_original_tokens(inner, up_to):
    sample = tuple(0.5 * x[:, :4] for x in data())
    exact = np.exp(sample[0] @ sample[1].swapaxes(-1, -2))
    # Every head draws vectors of its own: as many draws of the same pairs.
    many = tuple(np.tile(x, (DRAWS, 1, 1)) for x in sample)
    feature_map = maps.Conditioned(maps.get(inner, seed=0, num_features=64), up_to)
    found = kernel(adapted(feature_map, many), many).reshape(DRAWS, *exact.shape)
    error = found.std(0) / np.sqrt(DRAWS)
    # Student's t with 39 degrees of freedom, once in a million for 32 numbers.
    assert np.max(7 * error / exact) < 0.7
    assert np.all(np.abs(found.mean(0) - exact) < 7 * error + 1e-5 * exact)


def test_each_step_lowers_the_variance():
    sample = data()
    exact = np.exp(sample[0] @ sample[1].swapaxes(-1, -2))
    errors = {}
    for name, make in {
        "plain": lambda seed: maps.FavorPP(64, statistics="stored", seed=seed),
        "center": lambda s: maps.Conditioned(maps.FavorPP(64, seed=s), "center"),
        "balance": lambda s: maps.Conditioned(maps.FavorPP(64, seed=s), "balance"),
        "dense": lambda seed: maps.FavorPPDense(64, seed=seed),
    }.items():
        ratios = [kernel(adapted(make(s), sample), sample) / exact for s in range(8)]
        errors[name] = np.median(np.abs(np.array(ratios) - 1))
    assert errors["center"] < 0.9 * errors["plain"]
    assert errors["balance"] < 0.95 * errors["center"]
    assert errors["dense"] < errors["balance"]


def test_balance_makes_covariances_equal():
    sample = data(2000)
    feature_map = adapted(maps.Conditioned("favorplus", "balance"), sample)
    sides = []
    for x, matrix, center in zip(
        sample,
        (feature_map.query_matrix, feature_map.key_matrix),
        (feature_map.query_center, feature_map.key_center),
        strict=True,
    ):
        moved = (x - h.to_numpy(center)[:, None]) @ h.to_numpy(matrix).swapaxes(-1, -2)
        np.testing.assert_allclose(moved.mean(1), 0, atol=1e-5)
        sides.append(np.einsum("knh,kni->khi", moved, moved) / x.shape[1])
    h.assert_close(*sides, rtol=0.02)
    plain = moments.second_moments([sample])
    assert np.max(np.abs(plain[0] - plain[1])) > 0.3 * np.max(plain)


def test_rotation_makes_sums_uncorrelated():
    sample = data(2000)
    feature_map = adapted(maps.FavorPPDense(8), sample)
    sides = [
        (x - h.to_numpy(center)[:, None]) @ h.to_numpy(matrix).swapaxes(-1, -2)
        for x, matrix, center in zip(
            sample,
            (feature_map.query_matrix, feature_map.key_matrix),
            (feature_map.query_center, feature_map.key_center),
            strict=True,
        )
    ]
    total = sum(np.einsum("knh,kni->khi", x, x) / x.shape[1] for x in sides)
    diagonal = np.einsum("khh->kh", total)
    off = total - np.stack([np.diag(row) for row in diagonal])
    assert np.max(np.abs(off)) < 1e-4 * np.max(diagonal)
    # Which is what each direction's A is taken from.
    h.assert_close(feature_map.inner.mean_square, diagonal, 1e-4)


def test_matrices_keep_products():
    feature_map = adapted(maps.Conditioned("favorplus", "balance"), data())
    product = h.to_numpy(feature_map.query_matrix).swapaxes(-1, -2) @ h.to_numpy(
        feature_map.key_matrix
    )
    h.assert_close(product, np.broadcast_to(np.eye(DIM), product.shape), 1e-5)


def test_power_and_balance():
    generator = np.random.default_rng(2)
    a, b = (x @ x.swapaxes(-1, -2) for x in generator.normal(size=(2, 3, 5, 5)))
    h.assert_close(moments.power(a, 0.5) @ moments.power(a, 0.5), a, 1e-10)
    m = moments.balance(a, b, ridge=0)
    inverse = np.linalg.inv(m)
    h.assert_close(m @ a @ m, inverse @ b @ inverse, 1e-6)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("side", ["query_features", "key_features"])
def test_algorithms_compute_what_its_methods_do(side, is_nested):
    feature_map = maps.Conditioned(maps.FavorPlus(5, seed=0))
    if is_nested:
        feature_map = maps.Conditioned(feature_map)
    feature_map.build((None, None, HEADS, DIM))
    generator = np.random.default_rng(1)
    for weight in feature_map.weights:
        if "matrix" in weight.path or "center" in weight.path:
            weight.assign(weight + 0.3 * generator.normal(size=weight.shape))
    x = ops.convert_to_tensor(generator.normal(size=(2, 7, HEADS, DIM)), "float32")
    expected = getattr(feature_map, side)(x)
    actual = heads_first(feature_map.deferred(side, x), HEADS).compute()
    h.assert_close(ops.swapaxes(actual.log_scale, 1, 2), expected.log_scale, 1e-5)


def test_nothing_changes_before_adapt():
    sample = data()
    plain = maps.FavorPlus(16, seed=3)
    plain.build((None, None, HEADS, DIM))
    conditioned = maps.Conditioned(maps.FavorPlus(16, seed=3))
    conditioned.build((None, None, HEADS, DIM))
    assert not conditioned.is_calibrated
    h.assert_close(kernel(conditioned, sample), kernel(plain, sample), 1e-5)


@slow_on_jax
def test_calibrated_models_are_saved_and_restored(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20, 8))
    layer = keras.layers.MultiHeadAttention(2, 6, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    x = np.random.default_rng(0).normal(size=(4, 20, 8)).astype("float32") * 2
    softmax = model.predict(x, verbose=0)
    keras_rfattn.replace_attention(model, "favorpp_dense", num_features=512, seed=0)
    assert "uncalibrated" in str(keras_rfattn.describe_attention(model))
    keras_rfattn.calibrate(model, [x])
    assert "uncalibrated" not in str(keras_rfattn.describe_attention(model))
    linear = model.predict(x, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    h.assert_same(keras.saving.load_model(path).predict(x, verbose=0), linear)
    error = np.linalg.norm(linear - softmax) / np.linalg.norm(softmax)
    assert 0 < error < 0.3
    keras_rfattn.restore_attention(model)
    h.assert_same(model.predict(x, verbose=0), softmax)


def test_errors():
    with pytest.raises(ValueError, match="`feature_map` must estimate softmax"):
        maps.Conditioned("elu")
    with pytest.raises(ValueError, match="`up_to` must be one of"):
        maps.Conditioned("favor", up_to="whiten")


def test_a_subclass_has_a_fingerprint_of_its_own():
    class Own(maps.Relu):
        pass

    assert essence(Own(4, seed=0)) != essence(maps.Relu(4, seed=0))
