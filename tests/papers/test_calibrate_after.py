import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.papers.calibrate_after import CalibrateAfter
from tests.marks import slow_on_jax
from tests.uptraining import models as m

X = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32") * 2


def attention(feature_map):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    return keras_rfattn.replace_attention(model, feature_map, seed=0)


@slow_on_jax
def test_delayed_clustering_happens_once_and_stays():
    linear = attention("hybrid_clustered")
    feature_map = linear.get_layer("attention").feature_map
    asked, centers = [], []

    def data():
        asked.append(len(centers))
        return [X]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Asking for the model brings its variables up to date on JAX.
            layer = self.model.get_layer("attention")
            found = keras.ops.convert_to_numpy(layer.feature_map.query_centers)
            centers.append(np.array(found))

    after, watch = CalibrateAfter(data, steps=2), Watch()
    linear.compile(keras.optimizers.SGD(0.01), "mse")
    y = np.zeros((3, 6, 8), "float32")
    linear.fit(X, y, batch_size=1, epochs=2, verbose=0, callbacks=[after, watch])
    assert asked == [1] and len(centers) == 6
    assert not np.any(centers[0]) and np.any(centers[1])
    for found in centers[2:]:
        np.testing.assert_array_equal(found, centers[1])
    assert feature_map.is_calibrated
    # What `fit` has compiled sees the clusters.
    loss = linear.evaluate(X, y, verbose=0)
    linear.compile("sgd", "mse")
    np.testing.assert_allclose(loss, linear.evaluate(X, y, verbose=0), rtol=1e-6)


def test_delayed_clustering_refuses_what_never_learns():
    with pytest.raises(ValueError, match="`steps` must be a positive integer.*0"):
        CalibrateAfter([X], steps=0)
    linear = attention("elu")
    linear.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no feature map that learns from data"):
        linear.fit(X, X, verbose=0,
                   callbacks=[CalibrateAfter([X], 1)])  # fmt: skip


@pytest.mark.once
def test_calibrate_after_refuses_maps_that_train():
    model = m.linear_model("favorpp_learned", num_features=8)
    model.compile("sgd", "mse")
    x, y = m.tokens(8), np.zeros((8, m.TOKENS, m.DIM))
    before = m.weights(model)
    after = CalibrateAfter([x], 1)
    with pytest.raises(ValueError, match="attention_0'.*freeze these maps"):
        model.fit(x, y, verbose=0, callbacks=[after])
    for found, expected in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    model.compile("sgd", "mse", run_eagerly=True)
    for layer in model.layers:
        if hasattr(layer, "feature_map"):
            layer.feature_map.trainable = False
    model.fit(x, y, verbose=0, callbacks=[after])
    assert model.get_layer("attention_0").feature_map.is_calibrated
