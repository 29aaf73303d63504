"""Losses that are not finite and callbacks that fail leave good weights and say why."""

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.marks import slow_on_jax
from tests.uptraining import models as m


@pytest.mark.once
@slow_on_jax
def test_a_callback_may_stop_a_stage():
    class Enough(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.epoch in (2, 8)

        def on_epoch_begin(self, epoch, logs=None):
            # Of one step each, and counted on in the second stage.
            self.epoch = epoch

    report = m.uptrain(m.linear_model(), callbacks=[Enough()])
    assert [stage.steps for stage in report.stages] == [3, 3]


class Poison(keras.utils.PyDataset):
    """Batches of vectors, one of them with a NaN."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        x = np.random.default_rng(index).normal(size=(4, 6, 8)).astype("float32")
        if index == self.bad:
            x[0, 0] = np.nan
        return x


def test_nan_stops_and_the_last_good_weights_stay():
    def model():
        keras.utils.set_random_seed(0)
        x = keras.Input((6, 8))
        attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        result = keras.Model(x, attention(x, x))
        return keras_rfattn.replace_attention(result, "hedgehog", seed=0)

    arguments = {"stages": "attention", "optimizer": keras.optimizers.Adam(0.01)}
    broken = model()
    with pytest.raises(ValueError, match=r"not finite at its step 7 \(batch 7"):
        m.uptrain(broken, Poison(7), steps=9, **arguments)
    good = model()
    m.uptrain(good, Poison(99), steps=6, **arguments)
    for a, b in zip(m.weights(broken), m.weights(good), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_peaked_causal_attention_trains_after_calibration():
    model = m.softmax_model(causal=True)
    for weight in model.weights:
        if weight.path.endswith(("query/kernel", "key/kernel")):
            weight.assign(6 * weight)
    keras_rfattn.replace_attention(model, "favorpp_learned", num_features=8, seed=0)
    report = m.uptrain(model, stages=("calibrate", "attention"))
    _, stage = report.stages
    assert 0 < stage.last < stage.no_attention


@slow_on_jax
def test_weights_that_turn_nan_are_not_kept():
    model = m.linear_model()
    with pytest.raises(ValueError, match="not finite"):
        m.uptrain(model, optimizer=keras.optimizers.SGD(1e39), stages="attention")
    with pytest.raises(ValueError, match="not finite at its step 1"):
        # No loss has seen the weights of the only step.
        m.uptrain(
            model, optimizer=keras.optimizers.SGD(1e39), stages="features", steps=1
        )
    assert all(np.all(np.isfinite(w)) for w in m.weights(model))


def test_data_that_ends_early_is_named_and_good_weights_stay():
    model, expected, rows = m.linear_model(), m.linear_model(), m.tokens()[:16]
    # TensorFlow's datasets raise an error of their own, which holds the text of ours.
    kinds = {"tensorflow": "InvalidArgumentError"}
    with pytest.raises(Exception, match="none for step 7. Pass a function") as error:
        m.uptrain(model, (rows for _ in range(7)), stages="attention")
    kind = kinds.get(keras.backend.backend(), "ValueError")
    assert type(error.value).__name__ == kind
    # Seven steps, of which the last one's weights are not proven.
    m.uptrain(expected, lambda: [rows], stages="attention", callbacks=[Stop(6)])
    for a, b in zip(m.weights(model), m.weights(expected), strict=True):
        np.testing.assert_array_equal(a, b)


class Inside(keras.callbacks.Callback):
    """Interrupts a compiled step, as Ctrl-C does."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            function = self.model.train_function

            def interrupted(*args):
                function(*args)
                raise KeyboardInterrupt

            self.model.train_function = interrupted


def test_an_interrupted_step_leaves_the_model_its_weights():
    # On JAX the step has taken (donated) the weights of the whole model.
    model, expected = m.linear_model(), m.linear_model()
    with pytest.raises(KeyboardInterrupt):
        m.uptrain(model, callbacks=[Inside()], stages="attention")
    # Three epochs of two steps, of which the last one's weights are not proven.
    m.uptrain(expected, callbacks=[Stop(5)], stages="attention")
    for a, b in zip(m.weights(model), m.weights(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert m.uptrain(model, steps=2).after > 0


class Stop(keras.callbacks.Callback):
    """Ends a stage after so many steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left <= 0
