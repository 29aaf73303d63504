"""Runs one training stage with Keras' `fit` and a fresh optimizer."""

import math

import keras
import numpy as np

from keras_rfattn.backend.devices import dataset_of, forget_gradients
from keras_rfattn.layers.batches import too_long
from keras_rfattn.uptraining.resume import Interrupts
from keras_rfattn.uptraining.weights import assign, values_of

# Learning rates of maps in stage "features", by its objective.
FEATURES_RATES = {"features": 0.005, "logits": 0.001}
# Learning rates if weights of the model itself train: of attention only, or all.
OWN_RATE, ALL_RATE = 0.001, 0.0001
# Number of recent batches that are kept to explain errors. It needs several, because
# backends fetch batches ahead of the step that fails.
AHEAD = 8


def fit_stage(trainer, batches, planned_stage, optimizer, settings, save, resumed):
    """Trains a stage for its remaining steps."""
    (done, optimizer_values, errors), steps = resumed, planned_stage.steps
    variables = trainer.trainable_variables
    trainer.compile(optimizer=optimizer)
    optimizer.build(variables)
    if done:
        assign(optimizer.variables, optimizer_values)
    monitor, interrupts = LossMonitor(variables, done, list(errors)), Interrupts()
    checkpoint = settings.checkpoint

    def save_step(batch, logs):
        # The last step is not saved here: the optimizer may still change weights when
        # the stage ends.
        is_due = checkpoint is not None and monitor.done % checkpoint.every == 0
        if is_due and monitor.done != steps:
            save(monitor.done, monitor.errors, optimizer)

    saving = keras.callbacks.LambdaCallback(on_train_batch_end=save_step)
    recent, failures = [], []
    try:
        if done < steps:
            with interrupts.held():
                trainer.fit(
                    dataset_of(_remembering(batches, recent, failures)),
                    steps_per_epoch=steps - done,
                    shuffle=False,
                    callbacks=[monitor, *settings.callbacks, saving, interrupts],
                    verbose=settings.verbose,
                )
            monitor.check_weights()
    except NotFinite:
        assign(variables, monitor.good)
        step, name = monitor.done, planned_stage.stage.name
        raise ValueError(
            f"The loss of stage '{name}' is not finite at its step {step} (batch "
            f"{planned_stage.first + step} of the data). The weights of step "
            f"{max(step - 1, 0)}, the last good ones, are kept. Look for NaN in that "
            "batch, or use a smaller learning rate."
        ) from None
    except Exception as error:
        # TensorFlow replaces errors of the data iterator by errors of its own.
        cause = failures[0] if failures else error
        cause.add_note(
            f"{type(trainer).__name__} stopped after {monitor.done} of {steps} steps, "
            "possibly because of the next batch. The model keeps the weights so far."
        )
        hints = [too_long(trainer.model, batch["x"]) for (batch,) in recent]
        if any(hints):
            cause.add_note(max(hints))
        if failures:
            raise cause from None
        raise
    finally:
        forget_gradients(variables)
    return monitor.errors


def _remembering(batches, recent, failures):
    """Iterates over batches; keeps the latest in `recent`, an error in `failures`."""
    try:
        for batch in batches:
            recent[:] = [*recent[1 - AHEAD :], batch]
            yield batch
    except Exception as error:
        failures.append(error)
        raise


class NotFinite(Exception):
    """Raised if the loss of a step, or a weight after the last step, is not finite."""


class LossMonitor(keras.callbacks.Callback):
    """Stops training if a loss is not finite, and collects the errors of steps."""

    def __init__(self, variables, done, errors):
        super().__init__()
        self.variables, self.done, self.errors = variables, done, errors
        # Values with which the last finite loss was computed, and values after the last
        # step, whose loss is unknown yet.
        self.good = self.latest = values_of(variables)
        self.seen, self.totals = 0, {"loss": 0.0, "error": 0.0}

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        # Keras' logs are means over all steps so far; differences give this step.
        step = {}
        for name in self.totals:
            total = logs[name] * self.seen
            step[name], self.totals[name] = total - self.totals[name], total
        if not math.isfinite(step["loss"]):
            raise NotFinite
        # On JAX, reading `self.model` writes the trained values to its variables.
        _ = self.model
        self.good, self.latest = self.latest, values_of(self.variables)
        self.errors.append(float(step["error"]))
        self.done += 1

    def check_weights(self):
        """Raises `NotFinite` if the last step left weights that are not finite."""
        if not all(np.all(np.isfinite(x)) for x in self.latest):
            raise NotFinite


def rate_for(stage, objective, layers):
    """Returns the default learning rate of a stage."""
    if stage.trainable == "all":
        return ALL_RATE
    if stage.trainable != "maps":
        return OWN_RATE
    if stage.name == "features":
        return FEATURES_RATES[objective]
    return min(layer.feature_map.learning_rate for layer in layers)


def optimizer_for(rate, steps, given, is_float16):
    """Returns a fresh copy of the given optimizer, or the default one."""
    if given is not None:
        optimizer = type(given).from_config(given.get_config())
    else:
        warmup = max(1, steps // 20)
        schedule = keras.optimizers.schedules.CosineDecay(
            rate / 20,
            max(1, steps - warmup),
            alpha=1 / 20,
            warmup_target=rate,
            warmup_steps=warmup,
        )
        optimizer = keras.optimizers.Adam(schedule)
    if is_float16 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
