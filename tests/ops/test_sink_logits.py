"""Attention with a sink, against its formula."""

import keras
import numpy as np
import pytest

from keras_rfattn import feature_maps, layers, ops
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.decoding import onward
from keras_rfattn.ops.sink_logits import SinkMap
from tests import helpers as h
from tests.marks import first_on_jax, slow_on_jax

B, T, N, K, H = 2, 11, 4, 2, 6
SINKS = np.array([1.5, -2.0, 0.3, 4.0], "float32")
KEY_MASK = np.arange(T) < np.array([[T], [7]])


def array(x):
    return keras.ops.convert_to_numpy(x)


def tokens():
    generator = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, 5)
    return [generator.normal(size=x).astype("float32") for x in shapes]


def built(**arguments):
    feature_map = feature_maps.FavorPlus(num_features=16, seed=0, **arguments)
    feature_map.build((None, None, K, H))
    return feature_map


def formula(weights, value, causal):
    """`Σ w v / (Σ w + exp(s))` for weights `(B, N, T, T)` of visible tokens."""
    visible = np.broadcast_to(KEY_MASK[:, None, None], weights.shape)
    if causal:
        visible = visible & np.tril(np.ones((T, T), bool))
    weights = np.where(visible, weights, 0)
    total = weights.sum(-1, keepdims=True) + np.exp(SINKS)[:, None, None]
    value = np.repeat(value, N // K, axis=2)
    return np.einsum("bnts,bsnv->btnv", weights / total, value)


def feature_weights(feature_map, query, key):
    side = H**-0.25
    phi = [
        np.exp(np.asarray(array(x.dense().log_scale), "float64"))
        for x in (feature_map.query_features(side * query),
                  feature_map.key_features(side * key))
    ]  # fmt: skip
    return np.einsum("btnm,bsnm->bnts", phi[0], np.repeat(phi[1], N // K, axis=2))


@pytest.mark.parametrize("causal", first_on_jax([True, False]))
def test_features(causal):
    (query, key, value), feature_map = tokens(), built()
    expected = formula(feature_weights(feature_map, query, key), value, causal)
    for block_size in (4, 64):
        mask = ops.AttentionMask(KEY_MASK, causal=causal, self_attention=True)
        found = layers.attend(
            query, key, value, feature_map, mask,
            options=ops.Options(block_size=block_size), sink_logits=SINKS,
        )  # fmt: skip
        found = array(found)[KEY_MASK]
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected[KEY_MASK], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", first_on_jax([True, False]))
def test_softmax(causal):
    query, key, value = tokens()
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, N // K, axis=2))
    expected = formula(np.exp(logits / H**0.5), value, causal)
    mask = ops.AttentionMask(KEY_MASK, causal=causal, self_attention=True)
    found = layers.attend(
        query, key, value, built(), mask, recorder=Attention.softmax,
        sink_logits=SINKS,
    )  # fmt: skip
    found = array(found)[KEY_MASK]
    np.testing.assert_allclose(found, expected[KEY_MASK], rtol=1e-4, atol=1e-5)


@slow_on_jax
def test_states():
    (query, key, value), feature_map = tokens(), built()
    expected = formula(feature_weights(feature_map, query, key), value, True)
    sunk, state, found = SinkMap(feature_map, keras.ops.array(SINKS)), None, []
    for part in (slice(0, 4), slice(4, 5), slice(5, T)):
        arrays = (keras.ops.array(x[:, part]) for x in (query, key, value))
        mask = keras.ops.array(KEY_MASK[:, part])
        call = Attention(
            *arrays, ops.AttentionMask(mask, causal=True, self_attention=True),
            H**-0.5, sunk, ops.Options(),
        )  # fmt: skip
        output, state = onward(call, state)
        found.append(array(output))
    found = np.concatenate(found, axis=1)[KEY_MASK]
    np.testing.assert_allclose(found, expected[KEY_MASK], rtol=1e-4, atol=1e-5)


@slow_on_jax
def test_a_sink_far_above_all_keys_takes_everything():
    (query, key, value), feature_map = tokens(), built()
    mask = ops.AttentionMask(causal=True, self_attention=True)
    found = layers.attend(
        query, key, value, feature_map, mask, sink_logits=0 * SINKS + 1e4
    )
    assert np.abs(array(found)).max() < 1e-6


@slow_on_jax
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(causal):
    arrays, feature_map = [*tokens(), SINKS], built()
    visible = np.tril(np.ones((T, T), "float32"), k=0 if causal else T)
    visible = keras.ops.convert_to_tensor(visible)

    def linear(query, key, value, sinks):
        mask = ops.AttentionMask(causal=causal, self_attention=True)
        return layers.attend(query, key, value, feature_map, mask, sink_logits=sinks)

    def dense(query, key, value, sinks):
        side = H**-0.25
        query = keras.ops.exp(
            feature_map.query_features(side * query).dense().log_scale
        )
        key = keras.ops.exp(feature_map.key_features(side * key).dense().log_scale)
        key, value = (keras.ops.repeat(x, N // K, axis=2) for x in (key, value))
        weights = keras.ops.einsum("btnm,bsnm->bnts", query, key) * visible
        sinks = keras.ops.reshape(keras.ops.exp(sinks), (-1, 1, 1))
        total = keras.ops.sum(weights, axis=-1, keepdims=True) + sinks
        return keras.ops.einsum("bnts,bsnv->btnv", weights / total, value)

    found, expected = (h.gradients(x, *arrays) for x in (linear, dense))
    for a, b in zip(found, expected, strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max())
