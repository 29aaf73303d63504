"""Paths of weights are a function of the model alone."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps
from tests.helpers import NAMES, small
from tests.marks import each_map

pytestmark = pytest.mark.once

X = np.zeros((1, 4, 8), "float32")


def replaced(feature_map):
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    return keras_rfattn.replace_attention(model, feature_map, seed=0)


def drop_in(feature_map):
    attention = keras_rfattn.layers.MultiHeadAttention(
        2, 4, feature_map=feature_map, name="attention"
    )
    attention.build(X.shape, X.shape)
    return attention


def kernel_features(feature_map):
    layer = keras_rfattn.papers.KernelFeatures(feature_map, name="features")
    layer.build((2, 4))
    return layer


def paths(make, feature_map):
    found = [v.path for v in make(feature_map).variables]
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("make", [replaced, drop_in, kernel_features])
@pytest.mark.parametrize("name", each_map(NAMES))
def test_paths_are_the_same_each_time(name, make):
    def fresh():
        return feature_maps.get(name, seed=0, **small(name))

    if make is kernel_features and fresh().kernel != "softmax":
        pytest.skip("the layer refuses other kernels")
    first = paths(make, fresh())
    keras.layers.Dense(1), keras.layers.LayerNormalization(), fresh()
    assert paths(make, fresh()) == first
    assert any("/feature_map/" in path for path in first) or not fresh_weights(fresh())
    config = feature_maps.serialize(fresh())
    assert paths(make, feature_maps.get(config)) == first


def fresh_weights(feature_map):
    feature_map.build((None, None, 2, 4))
    return feature_map.weights


class Own(keras_rfattn.feature_maps.FeatureMap):
    """A user's map, with layers in every place that may hold one."""

    is_unbiased = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = [Pair(), {"x": Pair()}]
        self.named = keras.layers.Dense(4, name="mine")

    def build(self, input_shape):
        super().build(input_shape)
        self._late = Pair()
        pairs = self.first[0], self.first[1]["x"], self._late
        for layer in (*pairs, self.named):
            layer.build((None, 4))


class Pair(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._hidden, self.shown = keras.layers.Dense(4), keras.layers.Dense(4)

    def build(self, input_shape):
        self._hidden.build(input_shape)
        self.shown.build(input_shape)


def test_parts_of_own_maps():
    first = paths(replaced, Own(seed=0))
    assert paths(replaced, Own(seed=0)) == first
    parts = {path.split("feature_map/")[1] for path in first if "feature_map" in path}
    assert {
        "first_0/hidden/kernel", "first_1_x/shown/kernel", "late/hidden/bias",
        "mine/kernel",
    } <= parts  # fmt: skip
