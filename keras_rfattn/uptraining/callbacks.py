"""What watches over the training of a stage."""

import contextlib
import math
import signal
import threading

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
    """Saves checkpoints, after the user's callbacks; an interrupt waits for it.

    A step that is broken off within leaves a model without weights on JAX, which gives
    their memory to those that come.

    Args:
        watch: `Watch`.
        save: Called with `(steps done, errors)` every `save_every` steps, but at the
            end.
        save_every: Number of steps.
        last: Number of steps of the stage.
    """

    def __init__(self, watch, save, save_every, last):
        super().__init__()
        self.watch, self.save = watch, save
        self.save_every, self.last = save_every, last
        self.is_interrupted = False

    def on_train_batch_end(self, batch, logs=None):
        done = self.watch.done
        # What the optimizer does at the end of a stage comes after its last step.
        if done % self.save_every == 0 and done != self.last:
            self.save(done, self.watch.errors)
        if self.is_interrupted:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def holding_interrupts(self):
        """Ctrl-C takes effect at the end of a step meanwhile, a second one at once."""
        is_ours = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_ours else None
        if before is not signal.default_int_handler:
            yield
            return

        def hold(number, frame):
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.is_interrupted = True

        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.is_interrupted:
            raise KeyboardInterrupt
