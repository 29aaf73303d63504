"""Models that hold a changed layer forget what they compiled, and are saved with it."""

import gc

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.models import Plan
from keras_rfattn.models.holders import holders
from tests.helpers import assert_close, assert_same, to_numpy
from tests.marks import first

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


def inner_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 8))
    # Large weights, so that attention is not uniform.
    initializer = keras.initializers.RandomNormal(0, 1)
    attention = keras.layers.MultiHeadAttention(
        2, 4, name="attention", kernel_initializer=initializer
    )
    x = attention(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(8, name="last")(x))


def in_functional(model):
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, keras.layers.Dense(2)(model(inputs)))


def in_sequential(model):
    return keras.Sequential([keras.Input((6, 8)), model, keras.layers.Dense(2)])


def part(model):
    return keras.Model(model.input, model.layers[-2].output)


def in_wrapper(model):
    inputs = keras.Input((6, 8))
    many = keras.layers.Reshape((1, 6, 8))(inputs)
    return keras.Model(inputs, keras.layers.TimeDistributed(model)(many))


def twice(model):
    return in_sequential(in_functional(model))


@keras.saving.register_keras_serializable("test_holders")
class Outer(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner_model()

    def call(self, x):
        return self.inner(x)


def in_subclass(model):
    outer = Outer()
    outer.inner = model
    outer(X)
    return outer


AROUND = [in_functional, in_sequential, part, in_wrapper, twice, in_subclass]
# TensorFlow would compile for longer than it trains.
JIT = "auto" if keras.backend.backend() == "jax" else False
CHANGES = {
    "elu": lambda m: keras_rfattn.replace_attention(m, "elu"),
    "random": lambda m: keras_rfattn.replace_attention(m, "favorplus", seed=0),
    "plan": lambda m: keras_rfattn.replace_attention(m, Plan({"attention": "elu"})),
}


def check(outer, before, differs=True):
    """A compiled prediction is what the model computes now."""
    found = outer.predict(X, verbose=0)
    assert_close(found, to_numpy(outer(X)), 1e-5)
    assert differs == (np.max(np.abs(found - before)) > 1e-3 * np.max(np.abs(before)))


@pytest.mark.parametrize(
    ("around", "change"),
    first(
        [(in_functional, x) for x in ("elu", "random", "plan")]
        + [(x, "elu") for x in AROUND if x is not in_functional]
    ),
)
def test_compiled_predictions_follow(around, change):
    model = inner_model()
    outer = around(model)
    before = outer.predict(X, verbose=0)
    CHANGES[change](model)
    check(outer, before)
    keras_rfattn.restore_attention(model)
    check(outer, before, differs=False)


def test_frozen_objects_inside_of_the_model_are_found():
    model = inner_model()
    outer = in_functional(model)
    before = outer.predict(X, verbose=0)
    gc.freeze()
    try:
        keras_rfattn.replace_attention(outer, "elu")
    finally:
        gc.unfreeze()
    check(outer, before)
    assert type(outer.layers[1]) is type(model)


def test_one_search_for_each_change(monkeypatch):
    model = inner_model()
    in_functional(model)
    searches, search = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or search())
    keras_rfattn.replace_attention(model, "elu")
    keras_rfattn.restore_attention(model)
    assert len(searches) == 2


def test_training_and_evaluation_follow():
    model = inner_model()
    outer = in_functional(model)
    outer.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=JIT)
    y = np.ones((2, 6, 2))
    kept = outer.evaluate(X, y, verbose=0)
    outer.fit(X, y, verbose=0)
    keras_rfattn.replace_attention(model, "elu")
    loss = outer.evaluate(X, y, verbose=0)
    assert loss != pytest.approx(kept, rel=1e-4)
    assert outer.fit(X, y, verbose=0).history["loss"][0] == pytest.approx(loss, 1e-4)


def test_pytorch_counts_the_weights_of_the_models_around():
    model = inner_model()
    outer = twice(model)
    if keras.backend.backend() != "torch":
        pytest.skip("other backends keep no second list")
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    assert any("feature_map" in name for name in outer.state_dict())
    keras_rfattn.restore_attention(model)
    assert not any("feature_map" in name for name in outer.state_dict())


def trained(outer):
    outer.compile("adam", "mse")
    outer.optimizer.build(outer.trainable_variables)
    outer.optimizer.iterations.assign(1)  # as after a step
    return outer


def test_optimizers_of_models_around_are_checked_before_anything_changes():
    model = inner_model()
    outer = trained(in_functional(model))
    before = to_numpy(model(X))
    with pytest.raises(ValueError, match=f"Received: Functional '{outer.name}'"):
        keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    assert_same(model(X), before)
    assert type(model.get_layer("attention")) is keras.layers.MultiHeadAttention
    keras_rfattn.replace_attention(model, "favorplus", seed=0)
    keras_rfattn.restore_attention(model)
    outer.compile("adam", "mse", jit_compile=JIT)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    trained(outer)


def test_optimizers_of_models_that_are_gone_are_not():
    model = inner_model()
    trained(in_functional(model))
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)


def test_a_container_around_is_saved_as_linear(tmp_path):
    outer = Outer()
    outer(X)
    keras_rfattn.replace_attention(outer.inner, "favorplus", seed=0)
    assert isinstance(outer, Outer)
    outer.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert_close(loaded(X), outer(X))
    assert keras_rfattn.describe_attention(loaded).replaced
    keras_rfattn.restore_attention(outer.inner)
    assert type(outer) is Outer


def test_a_container_keeps_what_another_model_in_it_has():
    outer = Outer()
    outer.second = inner_model()
    outer(X)
    keras_rfattn.replace_attention(outer.inner, "favorplus", seed=0)
    keras_rfattn.replace_attention(outer.second, "favorplus", seed=0)
    keras_rfattn.restore_attention(outer.inner)
    assert type(outer) is not Outer
    keras_rfattn.restore_attention(outer.second)
    assert type(outer) is Outer


def test_holders():
    model = inner_model()
    outer = twice(model)
    found = {id(x) for x in holders([model.get_layer("attention")])}
    assert {id(model), id(outer), id(outer.layers[0])} <= found
    assert id(inner_model()) not in found and id(model.get_layer("last")) not in found


def test_attribution_reaches_models_around():
    model = keras_rfattn.replace_attention(inner_model(), "favorplus", seed=0)
    outer = in_functional(model)
    outer.predict(X, verbose=0)

    def metric(model, data):
        return np.mean(np.square(outer.predict(data, verbose=0)))

    found = keras_rfattn.diagnostics.attribute(model, X, metric)
    assert found.softmax != pytest.approx(found.as_it_is, rel=1e-3)
