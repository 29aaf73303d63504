"""A frozen layer's map is frozen; `trainable` of layers means what Keras says."""

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_same
from tests.marks import first

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
# Trained by gradients, and moved by a statistic of the data.
MAPS = ["hedgehog", "favorpp_learned"]


def functional():
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    x = keras.layers.MultiHeadAttention(2, 4, name="second")(x, x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def replaced(model, name):
    keras_rfattn.replace_attention(model, name, seed=0)
    return model


def of_map(layer):
    return [np.array(keras.ops.convert_to_numpy(w)) for w in layer.feature_map.weights]


def fit(model):
    # TensorFlow would compile for longer than it trains.
    is_tensorflow = keras.backend.backend() == "tensorflow"
    model.compile("sgd", "mse", run_eagerly=is_tensorflow)
    model.fit(X, np.ones((2, 6, 3)), verbose=0)


def moved(before, layer):
    after = of_map(layer)
    return any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("mechanism", first(MAPS))
def test_a_frozen_layer_gets_a_frozen_map(mechanism):
    model = functional()
    first, second = model.get_layer("first"), model.get_layer("second")
    first.trainable = False
    replaced(model, mechanism)
    assert first.trainable_weights == [] and not first.feature_map.trainable
    own = of_map(first), of_map(second)
    fit(model)
    assert not moved(own[0], first) and moved(own[1], second)
    first.trainable = True
    fit(model)
    assert moved(own[0], first)


def in_sequential(model):
    return keras.Sequential([model])


def in_functional(model):
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, model(inputs))


@pytest.mark.parametrize("around", [in_sequential, in_functional])
def test_a_frozen_parent_freezes_maps_below(around):
    model = functional()
    outer = around(model)
    outer.trainable = False
    replaced(model, "hedgehog")
    assert outer.trainable_weights == model.trainable_weights == []
    outer.trainable = True
    maps = [w for w in outer.trainable_weights if "/feature_map/" in w.path]
    assert len(maps) == len([w for w in outer.weights if "/feature_map/" in w.path])


def test_frozen_at_construction():
    layer = keras_rfattn.layers.MultiHeadAttention(
        2, 4, feature_map="hedgehog", trainable=False
    )
    layer(X, X)
    assert [w.trainable for w in layer.feature_map.weights] == [False, False]
    layer.trainable = True
    assert [w.trainable for w in layer.feature_map.weights] == [True, True]


def test_restoring_and_replacing_again_keeps_the_flag():
    model = functional()
    model.get_layer("first").trainable = False
    expected = [w.trainable for w in model.weights]
    replaced(model, "hedgehog")
    keras_rfattn.restore_attention(model)
    assert [w.trainable for w in model.weights] == expected
    replaced(model, "hedgehog")
    assert not model.get_layer("first").feature_map.trainable
    assert model.get_layer("second").feature_map.trainable


def test_files_keep_the_flag(tmp_path):
    model = functional()
    model.get_layer("first").trainable = False
    replaced(model, "hedgehog")
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    first, second = loaded.get_layer("first"), loaded.get_layer("second")
    assert [first.feature_map.trainable, second.feature_map.trainable] == [False, True]
    assert first.feature_map.trainable_weights == []
    assert_same(loaded(X), model(X))
    first.trainable = True
    assert len(first.feature_map.trainable_weights) == 2


@keras.saving.register_keras_serializable("test_frozen")
class Block(keras.layers.Layer):
    """Rebuilt from its config, without the flags of the layers inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return self.attention(x, x)


def test_a_map_is_not_frozen_alone_by_a_file(tmp_path):
    model = keras.Sequential([keras.Input((6, 8)), Block()])
    model.layers[0].attention.trainable = False
    replaced(model, "hedgehog")
    model.save(tmp_path / "m.keras")
    attention = keras.saving.load_model(tmp_path / "m.keras").layers[0].attention
    assert attention.trainable and attention.feature_map.trainable


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("when", ["before", "after"])
def test_uptrain_trains_maps_of_a_frozen_model(when):
    model = functional()
    model.trainable = when == "after"
    replaced(model, "hedgehog")
    model.trainable = False
    first = model.get_layer("first")
    maps, rest = of_map(first), keras.ops.convert_to_numpy(model.layers[-1].kernel)
    keras_rfattn.uptrain(model, X, steps=1, stages="attention", seed=0, verbose=0)
    assert moved(maps, first)
    assert_same(model.layers[-1].kernel, rest)
    assert model.trainable_weights == []
    assert not any(w.trainable for w in model.weights)


@pytest.mark.full
@pytest.mark.once
def test_a_map_frozen_on_purpose_stays_as_it_is():
    model = replaced(functional(), "hedgehog")
    first, second = model.get_layer("first"), model.get_layer("second")
    first.feature_map.trainable = False
    maps = of_map(first), of_map(second)
    keras_rfattn.uptrain(model, X, steps=1, stages="attention", seed=0, verbose=0)
    assert not moved(maps[0], first) and moved(maps[1], second)


def test_calibrate_measures_in_a_frozen_model():
    model = functional()
    model.trainable = False
    replaced(model, "favorpp")
    keras_rfattn.calibrate(model, [X], verbose=0)
    assert model.get_layer("first").feature_map.is_calibrated
