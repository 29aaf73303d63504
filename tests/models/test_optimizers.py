"""Which weights train cannot change once an optimizer has trained: refused before."""

import gc

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_same, to_numpy

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(4, 6, 8)).astype("float32") for _ in range(2))
# TensorFlow would compile for longer than it trains.
JIT = "auto" if keras.backend.backend() == "jax" else False


def made():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    x = keras.layers.MultiHeadAttention(2, 4, name="second")(x, x)
    return keras.Model(inputs, keras.layers.Dense(8, name="last")(x))


def compiled(model):
    model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=JIT)
    return model


def losses(model, steps=2):
    history = model.fit(X, Y, batch_size=4, epochs=steps, verbose=0, shuffle=False)
    return history.history["loss"]


def hedgehog(model):
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


def freeze(model, value=False):
    model.get_layer("first").feature_map.trainable = value


def with_frozen_map(model):
    freeze(hedgehog(model))
    return model


CHANGES = {
    "replace": (lambda m: m, hedgehog),
    "replace one": (
        lambda m: m,
        lambda m: keras_rfattn.replace_attention(m, "hedgehog", include="first"),
    ),
    "restore": (hedgehog, keras_rfattn.restore_attention),
    "restore one": (
        hedgehog,
        lambda m: keras_rfattn.restore_attention(m, include="first"),
    ),
    "freeze": (hedgehog, freeze),
    "unfreeze": (with_frozen_map, lambda m: freeze(m, True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refused_before_anything_changes(name):
    before, change = CHANGES[name]
    model = compiled(before(made()))
    losses(model)

    def state():
        layers = [type(x) for x in model.layers]
        flags = [(w.path, w.trainable) for w in model.weights]
        return layers, flags, [to_numpy(w) for w in model.weights]

    *kinds, values = state()
    with pytest.raises(ValueError, match="Compile the model with a new optimizer"):
        change(model)
    *kinds_after, values_after = state()
    assert kinds_after == kinds
    for a, b in zip(values_after, values, strict=True):
        np.testing.assert_array_equal(a, b)
    found = losses(model)
    # A new optimizer lets the change through, and training goes on.
    change(compiled(model))
    found += losses(model)
    assert found[1] < found[0] and found[3] < found[2]
    assert [(w.path, w.trainable) for w in model.weights] != kinds[1]


def test_sets_of_maps_are_refused(tmp_path):
    folder = keras_rfattn.save_maps(hedgehog(made()), tmp_path / "maps")
    model = compiled(made())
    losses(model)
    output = to_numpy(model(X))
    with pytest.raises(ValueError, match="Compile the model with a new optimizer"):
        keras_rfattn.load_maps(model, folder, base="any")
    assert type(model.get_layer("first")) is keras.layers.MultiHeadAttention
    assert_same(model(X), output)
    losses(model)


def test_what_trains_no_other_weight_needs_no_new_optimizer():
    model = compiled(made())
    losses(model)
    optimizer = model.optimizer
    # Its map has no weights that train.
    keras_rfattn.replace_attention(model, "favorplus", num_features=8, seed=0)
    assert losses(model)[-1] < np.inf
    keras_rfattn.restore_attention(model)
    assert losses(model)[-1] < np.inf and model.optimizer is optimizer
    hedgehog(compiled(model))
    losses(model)
    freeze(model, True)  # it trains already
    losses(model)


def test_a_frozen_layer_may_be_replaced():
    model = made()
    model.get_layer("first").trainable = False
    losses(compiled(model))
    keras_rfattn.replace_attention(model, "hedgehog", include="first", seed=0)
    assert not model.get_layer("first").feature_map.trainable
    assert losses(model)[-1] < np.inf
    keras_rfattn.restore_attention(model)
    assert losses(model)[-1] < np.inf


def test_layers_are_frozen_as_in_keras_before_compiling_again():
    model = compiled(hedgehog(made()))
    losses(model)
    model.trainable = False
    assert not model.get_layer("first").feature_map.trainable
    model.trainable = True
    model.get_layer("first").trainable = False
    assert not model.get_layer("first").feature_map.trainable
    frozen = [to_numpy(w) for w in model.get_layer("first").weights]
    losses(compiled(model))
    for a, b in zip(model.get_layer("first").weights, frozen, strict=True):
        np.testing.assert_array_equal(to_numpy(a), b)


def test_a_model_around_counts_and_one_that_is_gone_does_not():
    model = hedgehog(made())
    inputs = keras.Input((6, 8))
    outer = compiled(keras.Model(inputs, model(inputs)))
    outer.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match=f"'{outer.name}', whose Adam has trained"):
        keras_rfattn.restore_attention(model)
    del outer, inputs
    gc.collect()
    keras_rfattn.restore_attention(model)
    losses(compiled(model))


def test_adapters():
    keras_hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        20, 2, 2, 8, 16, dropout=0.0, max_sequence_length=8
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    ids = RNG.integers(1, 20, (4, 8)).astype("int32")
    data = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
    hedgehog(model)

    def compile_and_fit():
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=JIT,
        )
        return fit()

    def fit():
        labels = np.array([0, 1, 0, 1])
        return model.fit(data, labels, epochs=2, verbose=0).history["loss"]

    compile_and_fit()
    flags = [(w.path, w.trainable) for w in model.weights]
    with pytest.raises(ValueError, match="Compile the model with a new optimizer"):
        backbone.enable_lora(2)
    assert [(w.path, w.trainable) for w in model.weights] == flags
    fit()
    model.compile("adam", "sparse_categorical_crossentropy")
    backbone.enable_lora(2)
    found = compile_and_fit()
    assert found[-1] < found[0]
    assert any("lora" in w.path for w in model.trainable_weights)


@pytest.mark.parametrize("name", CHANGES)
def test_an_optimizer_that_only_evaluated_begins_anew(name):
    before, change = CHANGES[name]
    expected = before(made())
    change(expected)
    model = compiled(before(made()))
    model.evaluate(X, Y, verbose=0)
    change(model)
    np.testing.assert_allclose(losses(model), losses(compiled(expected)), rtol=1e-5)
