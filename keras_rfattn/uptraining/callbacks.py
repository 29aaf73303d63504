"""What watches over the training of a stage."""

import math

import keras
import numpy as np

from keras_rfattn.uptraining.resume import state_of


class NotFinite(Exception):
    """The loss of a step is not finite."""


class Watch(keras.callbacks.Callback):
    """Stops at a loss that is not finite, and keeps the errors.

    Args:
        variables: Those that train.
        done: Steps of the stage that were done before.
        errors: Their errors.

    Attributes:
        good: Values of `variables` with which the last finite loss was computed.
    """

    def __init__(self, variables, done, errors):
        super().__init__()
        self.variables, self.done, self.errors = variables, done, errors
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

    def check_weights(self):
        """Raises `NotFinite` if the last step, which no loss proves, left bad ones."""
        if not all(np.all(np.isfinite(x)) for x in self.unproven):
            raise NotFinite


class Save(keras.callbacks.Callback):
    """Saves checkpoints, after the user's callbacks; then interrupts take effect.

    Args:
        watch: `Watch`.
        interrupts: `Interrupts`.
        save: Called with `(steps done, errors)` every `save_every` steps, but at the
            end.
        save_every: Number of steps.
        last: Number of steps of the stage.
    """

    def __init__(self, watch, interrupts, save, save_every, last):
        super().__init__()
        self.watch, self.interrupts, self.save = watch, interrupts, save
        self.save_every, self.last = save_every, last

    def on_train_batch_end(self, batch, logs=None):
        done = self.watch.done
        # What the optimizer does at the end of a stage comes after its last step.
        if done % self.save_every == 0 and done != self.last:
            self.save(done, self.watch.errors)
        if self.interrupts.is_pending:
            raise KeyboardInterrupt
