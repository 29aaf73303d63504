"""Callbacks that watch and save the training of a stage."""

import math

import keras
import numpy as np

from keras_rfattn.uptraining.resume import state_of


class NotFinite(Exception):
    """Raised if the loss of a step, or a weight after the last step, is not finite."""


class Watch(keras.callbacks.Callback):
    """Stops training if a loss is not finite, and collects the errors of steps.

    Args:
        variables: The variables that train.
        done: Number of steps of the stage done before, by an interrupted run.
        errors: List with the errors of those steps.

    Attributes:
        good: Values of `variables` with which the last finite loss was computed.
        unproven: Current values of `variables`; no loss has been computed with them.
    """

    def __init__(self, variables, done, errors):
        super().__init__()
        self.variables, self.done, self.errors = variables, done, errors
        self.good = self.unproven = state_of(variables)
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
        self.good, self.unproven = self.unproven, state_of(self.variables)
        self.errors.append(float(step["error"]))
        self.done += 1

    def check_weights(self):
        """Raises `NotFinite` if the last step left weights that are not finite."""
        if not all(np.all(np.isfinite(x)) for x in self.unproven):
            raise NotFinite


class Save(keras.callbacks.Callback):
    """Saves checkpoints after the user's callbacks, then lets interrupts take effect.

    Args:
        watch: The `Watch` of the stage.
        interrupts: The `Interrupts` that hold Ctrl-C back.
        save: Function called with `(steps done, errors)` every `save_every` steps,
            except at the end of the stage.
        save_every: Number of steps between checkpoints.
        last: Number of steps of the stage.
    """

    def __init__(self, watch, interrupts, save, save_every, last):
        super().__init__()
        self.watch, self.interrupts, self.save = watch, interrupts, save
        self.save_every, self.last = save_every, last

    def on_train_batch_end(self, batch, logs=None):
        done = self.watch.done
        # The last step is not saved here: the optimizer may still change weights when
        # the stage ends.
        if done % self.save_every == 0 and done != self.last:
            self.save(done, self.watch.errors)
        if self.interrupts.is_pending:
            raise KeyboardInterrupt
