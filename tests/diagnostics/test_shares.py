"""Shares of softmax weight by part of the context, against their definition."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics

LENGTH, WINDOW, SINKS = 12, 3, 2


def model(causal):
    inputs = keras.Input((LENGTH, 16))
    layer = keras.layers.MultiHeadAttention(2, 8, name="attention")
    outputs = layer(inputs, inputs, use_causal_mask=causal)
    return keras.Model(inputs, outputs)


def expected(model, x, causal, sliding):
    """Computes the shares from the scores that Keras returns."""
    layer = model.get_layer("attention")
    _, scores = layer(x, x, use_causal_mask=causal, return_attention_scores=True)
    scores = keras.ops.convert_to_numpy(scores).astype("float64")
    token = np.arange(LENGTH)
    apart = token[None] // WINDOW - token[:, None] // WINDOW
    near = (apart == 0) | (sliding & ((apart == -1) | ((apart == 1) & (not causal))))
    first = np.broadcast_to(token < SINKS, near.shape)
    parts = [first, near & ~first, ~near & ~first]
    visible = np.tri(LENGTH, dtype=bool) if causal else np.ones_like(first)
    rows = (parts[2] & visible).any(axis=1)
    by_head = [(scores * part).sum(-1)[:, :, rows].mean(axis=(0, 2)) for part in parts]
    return [x.mean() for x in by_head], by_head[2].max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sliding", [True, False])
def test_shares_are_those_of_the_scores(causal, sliding):
    x = np.random.default_rng(0).normal(size=(3, LENGTH, 16)).astype("float32") * 2
    one = model(causal)
    shares, largest = expected(one, x, causal, sliding)
    keras_rfattn.replace_attention(one, "favorplus", seed=0)
    found = diagnostics.weight_shares(one, [x], WINDOW, SINKS, sliding, verbose=0)
    ((path, *parts, largest_rest),) = found.layers
    assert path == "attention" and min(shares) > 0.01
    np.testing.assert_allclose(parts, shares, rtol=1e-4)
    np.testing.assert_allclose(largest_rest, largest, rtol=1e-4)
    assert f"first {SINKS}" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": LENGTH}, "a sequence that is longer"),
        ({"window": 0}, "`window` must be a positive"),
        ({"window": 4, "sinks": -1}, "`sinks` must be a number of tokens"),
    ],
)
def test_bad_arguments(arguments, message):
    one = keras_rfattn.replace_attention(model(True), "favorplus", seed=0)
    with pytest.raises(ValueError, match=message):
        diagnostics.weight_shares(
            one, [np.ones((1, LENGTH, 16), "float32")], verbose=0, **arguments
        )
