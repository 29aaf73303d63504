"""Attention of queries and keys of length one."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers import MultiHeadAttention, record
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options
from tests import helpers as h
from tests.marks import first
from tests.models import families

TEMPERATURE = 0.2


def arrays(length=12):
    draw = np.random.default_rng(3).normal
    return [draw(size=(2, length, n, 8)).astype("float32") for n in (4, 2, 2)]


def exact(query, key, value):
    """Softmax attention of normalized vectors, in float64."""
    key, value = (np.repeat(x, 2, axis=2) for x in (key, value))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    logits = np.einsum("btnh,bsnh->bnts", query, key).astype("float64") / TEMPERATURE
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnv->btnv", weights, value)


def attention(name, options):
    feature_map = h.build(name, kv_heads=2, head_dim=8)
    mask = AttentionMask(self_attention=True)
    call = h.one_program(lambda *x: attend(*x, feature_map, mask, options=options))
    return lambda x: h.to_numpy(call(*map(ops.convert_to_tensor, x)))


def test_a_window_over_everything_is_softmax_of_normalized_vectors():
    x, options = arrays(), Options(window=12, temperature=TEMPERATURE)
    h.assert_close(attention("favorpp", options)(x), exact(*x))


@pytest.mark.parametrize(
    "name", first(["favorpp", "hybrid_angular", "elu", "polysketch"])
)
def test_lengths_change_nothing(name):
    x, options = arrays(), Options(temperature=TEMPERATURE)
    scaled = [x[0] * 7, x[1] * 0.1, x[2]]
    found, expected = map(attention(name, options), (scaled, x))
    h.assert_close(found, expected, 1e-4)
    plain = attention(name, Options())(x)
    assert np.abs(plain - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.full
@pytest.mark.once
def test_surgery_saves_it_and_names_it(tmp_path):
    model, inputs = families.build("bert")
    keras_rfattn.replace_attention(
        model, "hybrid_angular", num_features=8, temperature=0.5, seed=0
    )
    assert "normalized, temperature 0.5" in str(keras_rfattn.describe_attention(model))
    expected = model.predict(inputs, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(
        *map(keras.tree.flatten, (again.predict(inputs, verbose=0), expected)),
        strict=True,
    ):
        h.assert_close(a, b)
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = families.build("bert")
    keras_rfattn.replace_attention(other, "hybrid_angular", num_features=8, seed=0)
    with pytest.raises(ValueError, match="attention|mechanism"):
        other.load_weights(tmp_path / "model.weights.h5")


def test_what_is_recorded_is_what_features_are_of():
    layer = MultiHeadAttention(
        2, 4, feature_map="favorpp", num_features=8, temperature=TEMPERATURE, seed=0
    )
    x = arrays()[0][:, :, 0]
    layer(x, x)
    inputs = keras.Input((12, 8))
    model = keras.Model(inputs, layer(inputs, inputs))
    ((_, _, (sequence, _)),) = record(model, [x])
    norms = np.linalg.norm(sequence.query, axis=-1)
    np.testing.assert_allclose(norms, TEMPERATURE**-0.5, rtol=1e-5)
    assert np.ptp(np.linalg.norm(sequence.softmax[0], axis=-1)) > 0.01


@pytest.mark.parametrize("wrong", [0, -1.0, "hot", True, float("inf")])
def test_wrong_temperatures_are_refused(wrong):
    with pytest.raises(ValueError, match="`temperature` must be a positive number"):
        Options(temperature=wrong)
