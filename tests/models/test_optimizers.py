"""Training goes on when the set of trained weights changes under a built optimizer."""

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_same, to_numpy
from tests.marks import first

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(4, 6, 8)).astype("float32") for _ in range(2))
# TensorFlow would compile for longer than it trains.
JIT = "auto" if keras.backend.backend() == "jax" else False
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "average": lambda: keras.optimizers.Adam(1e-2, use_ema=True, amsgrad=True),
    "steps": lambda: keras.optimizers.SGD(
        1e-2, momentum=0.9, gradient_accumulation_steps=2
    ),
    "nadam": lambda: keras.optimizers.Nadam(
        keras.optimizers.schedules.CosineDecay(1e-2, 100)
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "muon": lambda: keras.optimizers.Muon(1e-2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2)
    ),
}


def made():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    x = keras.layers.MultiHeadAttention(2, 4, name="second")(x, x)
    return keras.Model(inputs, keras.layers.Dense(8, name="last")(x))


def compiled(model, optimizer="adam"):
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=JIT)
    return model


def losses(model, steps=3):
    history = model.fit(X, Y, batch_size=4, epochs=steps, verbose=0, shuffle=False)
    return history.history["loss"]


def moments(model):
    """The moments of Adam by the path of their weight, and the number of steps."""
    optimizer = model.optimizer
    slots = zip(optimizer._momentums, optimizer._velocities, strict=True)
    paths = [w.path for w in model.trainable_variables]
    pairs = [[to_numpy(x) for x in pair] for pair in slots]
    return dict(zip(paths, pairs, strict=True)), int(optimizer._iterations)


def with_moments(model, found, steps):
    """Compiles a model with moments that are carried over by hand."""
    optimizer = compiled(model).optimizer
    optimizer.build(model.trainable_variables)
    for i, weight in enumerate(model.trainable_variables):
        for slots, value in zip(
            (optimizer._momentums, optimizer._velocities),
            found.get(weight.path, (0, 0)),
            strict=True,
        ):
            slots[i].assign(np.broadcast_to(value, weight.shape))
    optimizer._iterations.assign(steps)
    return model


def hedgehog(model):
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


CHANGES = {
    "replace": (lambda m: m, hedgehog),
    "restore": (hedgehog, keras_rfattn.restore_attention),
    "restore one": (
        hedgehog,
        lambda m: keras_rfattn.restore_attention(m, include="first"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_moments_stay_with_their_weights(name):
    before, change = CHANGES[name]
    model = compiled(before(made()))
    losses(model)
    by_hand, afresh = before(made()), before(made())
    for other in (by_hand, afresh):
        other.set_weights(model.get_weights())
        change(other)
    by_hand = with_moments(by_hand, *moments(model))
    change(model)
    found, expected = losses(model), losses(by_hand)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(np.subtract(losses(compiled(afresh)), expected)[1:]).max() > 1e-3
    for a, b in zip(model.weights, by_hand.weights, strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", first(OPTIMIZERS))
def test_every_optimizer_keeps_its_slots(name):
    model = compiled(made(), name)
    losses(model)
    optimizer = model.optimizer
    before = [to_numpy(x) for x in optimizer.variables]
    hedgehog(model)
    fresh = OPTIMIZERS[name]()
    fresh.build(model.trainable_variables)
    # The order decides to which slots saved values belong.
    assert model.optimizer is optimizer
    shapes = [tuple(x.shape) for x in fresh.variables]
    assert [tuple(x.shape) for x in optimizer.variables] == shapes
    assert len(shapes) > len(before)
    keras_rfattn.restore_attention(model)
    for a, b in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(to_numpy(a), b)
    assert any(np.any(x) for x in before[2:])
    hedgehog(model)
    found = losses(model)
    assert found[-1] < found[0]


def test_averages_of_new_weights_begin_at_their_values():
    model = compiled(made(), "average")
    losses(model, 1)
    hedgehog(model)
    slots = model.optimizer._model_variables_moving_average
    pairs = zip(model.trainable_variables, slots, strict=True)
    pairs = [pair for pair in pairs if "feature_map" in pair[0].path]
    assert pairs and np.any(to_numpy(pairs[0][0]))
    for weight, average in pairs:
        assert_same(average, to_numpy(weight))


@keras.saving.register_keras_serializable("test_optimizers")
class Own(keras.optimizers.SGD):
    """An optimizer whose slots are not known."""


def test_an_optimizer_that_cannot_follow_is_refused_before_anything_changes():
    for change in (hedgehog, keras_rfattn.restore_attention):
        model = made()
        if change is not hedgehog:
            hedgehog(model)
        model.compile(Own(1e-2), "mse", jit_compile=JIT)
        losses(model, 1)
        kind, output = type(model.get_layer("first")), to_numpy(model(X))
        with pytest.raises(ValueError, match="Compile the model with a new optimizer"):
            change(model)
        assert type(model.get_layer("first")) is kind
        assert_same(model(X), output)
        losses(model, 1)
        model.compile("sgd", "mse", jit_compile=JIT)
        change(model)
        losses(model, 1)


def test_an_optimizer_of_other_weights_is_refused():
    model = compiled(made())
    losses(model, 1)
    model.get_layer("last").trainable = False
    with pytest.raises(ValueError, match="built for other weights than the model"):
        hedgehog(model)
    assert type(model.get_layer("first")) is keras.layers.MultiHeadAttention


def test_adapters():
    keras_hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        20, 2, 2, 8, 16, dropout=0.0, max_sequence_length=8
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT,
    )
    ids = RNG.integers(1, 20, (4, 8)).astype("int32")
    data = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
    hedgehog(model)

    def fit():
        labels = np.array([0, 1, 0, 1])
        return model.fit(data, labels, epochs=2, verbose=0).history["loss"]

    fit()
    head = moments(model)[0]["logits/kernel"]
    backbone.enable_lora(2)
    after, steps = moments(model)
    assert steps == 2 and any("lora" in path for path in after)
    for a, b in zip(after["logits/kernel"], head, strict=True):
        assert np.any(b)
        np.testing.assert_array_equal(a, b)
    found = fit()
    assert found[-1] < found[0]
