import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.feature_maps import fits


def model(feature_map):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    result = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    return keras_rfattn.replace_attention(result, feature_map, seed=0)


def batches(count, scale=2.0):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(3, 6, 8)).astype("float32") * scale for _ in range(count)]


def test_stores_the_mean_over_batches():
    linear, data = model("favorpp"), batches(3)
    feature_map = linear.get_layer("attention").feature_map
    uncalibrated = linear.predict(data[0], verbose=0)
    assert "uncalibrated" in str(keras_rfattn.describe_attention(linear))
    assert keras_rfattn.calibrate(linear, data) is linear
    stored = keras.ops.convert_to_numpy(feature_map.a).copy()

    layer = linear.get_layer("attention")
    expected = []
    for x in data:
        query, key = (
            keras.ops.convert_to_numpy(dense(keras.ops.convert_to_tensor(x)))
            for dense in (layer._query_dense, layer._key_dense)
        )
        # (B, T, S, N, H), each side scaled by head_dim^-1/4.
        pairs = (query[:, :, None] + key[:, None]) * 4**-0.25
        expected.append((pairs**2).sum(-1).mean((0, 1, 2)))
    expected = fits.best_a(np.mean(expected, axis=0), 4)
    expected = keras.ops.convert_to_numpy(expected)[:, None]
    np.testing.assert_allclose(stored, expected, 1e-4)
    assert stored.max() < -0.01
    assert linear.get_layer("attention").recorder is None
    linear.predict_function = None
    assert np.any(linear.predict(data[0], verbose=0) != uncalibrated)
    row = keras_rfattn.describe_attention(linear).rows[0]
    assert row.note == "calibrated"
    # A second calibration forgets the first.
    keras_rfattn.calibrate(linear, batches(1, scale=0.1))
    assert (keras.ops.convert_to_numpy(feature_map.a) > stored / 10).all()


def test_deeper_layers_meet_softmax_activations_or_the_models_own():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    first = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    second = keras.layers.MultiHeadAttention(2, 4, name="second")
    stacked = keras.Model(inputs, second(10 * first, 10 * first))
    keras_rfattn.replace_attention(stacked, "favorpp", num_features=2, seed=0)

    def measured(name):
        a = stacked.get_layer(name).feature_map.a
        return keras.ops.convert_to_numpy(a).copy()

    keras_rfattn.calibrate(stacked, batches(2))
    exact = {name: measured(name) for name in ("first", "second")}
    keras_rfattn.calibrate(stacked, batches(2), exact=False)
    np.testing.assert_allclose(measured("first"), exact["first"], rtol=1e-5)
    assert np.all(np.abs(measured("second") / exact["second"] - 1) > 1e-3)


@pytest.mark.parametrize("factor, message", [(1e6, "too large"), (np.nan, "finite")])
def test_a_map_that_cannot_adapt_leaves_the_model_as_it_was(factor, message):
    inputs = keras.Input((6, 8))
    first = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    second = keras.layers.MultiHeadAttention(2, 4, name="second")
    stacked = keras.Model(inputs, second(factor * first, factor * first))
    keras_rfattn.replace_attention(stacked, "poisson", num_features=2, seed=0)

    def values():
        return [np.array(keras.ops.convert_to_numpy(w)) for w in stacked.weights]

    before = values()
    with pytest.raises(ValueError, match=message):
        keras_rfattn.calibrate(stacked, batches(2), exact=False)
    for value, expected in zip(values(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert "uncalibrated" in str(keras_rfattn.describe_attention(stacked))


def test_errors():
    with pytest.raises(ValueError, match="learns from data"):
        keras_rfattn.calibrate(model("favorplus"), batches(1))
    with pytest.raises(ValueError, match="at least one batch"):
        keras_rfattn.calibrate(model("favorpp"), [])
    with pytest.raises(TypeError, match="Keras model"):
        keras_rfattn.calibrate(feature_maps, batches(1))
