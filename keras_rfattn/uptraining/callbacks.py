"""What watches over the training of a stage."""

import math

import keras
import numpy as np

from keras_rfattn.uptraining.resume import state_of


class NotFinite(Exception):
    """The loss of a step is not finite."""


class Watch(keras.callbacks.Callback):
    """Stops at a loss that is not finite, keeps the errors, and saves checkpoints.

    Args:
        variables: Those that train.
        done: Steps of the stage that were done before.
        errors: Their errors.
        save: Called with `(steps done, errors)` every `save_every` steps, but at the
            end.
        save_every: Number of steps.
        last: Number of steps of the stage.

    Attributes:
        good: Values of `variables` with which the last finite loss was computed.
    """

    def __init__(self, variables, done, errors, save, save_every, last):
        super().__init__()
        self.variables, self.done, self.errors = variables, done, errors
        self.save, self.save_every, self.last = save, save_every, last
        self.good = self.unproven = state_of(variables)
        self.seen, self.totals = 0, {"loss": 0.0, "error": 0.0}

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        # Keras' logs are means since the start.
        step = {}
        for name in self.totals:
            total = logs[name] * self.seen
            step[name], self.totals[name] = total - self.totals[name], total
        if not math.isfinite(step["loss"]):
            raise NotFinite
        # Asking for the model brings its variables up to date on JAX.
        _ = self.model
        self.good, self.unproven = self.unproven, state_of(self.variables)
        self.errors.append(float(step["error"]))
        self.done += 1
        # What the optimizer does at the end of a stage comes after its last step.
        if self.done % self.save_every == 0 and self.done != self.last:
            self.save(self.done, self.errors)

    def check_weights(self):
        """Raises `NotFinite` if the last step, which no loss proves, left bad ones."""
        if not all(np.all(np.isfinite(x)) for x in self.unproven):
            raise NotFinite
