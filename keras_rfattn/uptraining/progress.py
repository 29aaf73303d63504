"""What a run of `uptrain` has done so far, kept in memory and in checkpoints."""

import contextlib
import math
import time
from dataclasses import replace

import keras
import numpy as np

from keras_rfattn.backend.devices import donates_weights
from keras_rfattn.uptraining.report import StageResult
from keras_rfattn.uptraining.weights import assign, once, values_of


class Progress(keras.callbacks.Callback):
    """Callback that keeps the errors of steps, and the last good values of weights."""

    def __init__(self, model, layers, trained):
        super().__init__()
        of_maps = [v for layer in layers for v in layer.feature_map.variables]
        # Checkpoints hold these; all other weights are the teacher's and never change.
        self.state = once([*trained, *of_maps])
        changing = {id(v) for v in self.state}
        others = [v for v in model.variables if id(v) not in changing]
        self.frozen = others if donates_weights() else []
        self.frozen_values = values_of(self.frozen)
        # Values with which the last finite loss was computed, and values after the last
        # step, whose loss is unknown yet.
        self.good = self.latest = values_of(self.state)
        self.checkpoint, self.identity, self.arrays = None, None, {}
        # Errors before training and of uniform attention, and results of stages.
        self.before, self.control, self.results = None, None, []
        self.start, self.stage_seconds = time.perf_counter(), 0.0
        self.done, self.errors, self.optimizer_values = 0, [], []

    @property
    def seconds(self):
        """Duration of the run so far, without interruptions."""
        return time.perf_counter() - self.start

    @contextlib.contextmanager
    def kept(self):
        """Context manager that gives the model its last good weights if it raises."""
        try:
            yield
        except BaseException:
            assign([*self.state, *self.frozen], [*self.good, *self.frozen_values])
            raise

    def load(self, checkpoint, identity):
        """Reads what a checkpoint of this run holds, if there is one."""
        self.checkpoint, self.identity = checkpoint, identity
        saved = checkpoint.load(identity)
        if saved is None:
            return
        self.arrays, notes = saved
        self.before, self.control = (
            np.array(notes["before"]),
            np.array(notes["control"]),
        )
        self.results = [StageResult(*row) for row in notes["results"]]
        self.start -= notes["seconds"]
        self.stage_seconds, self.errors = notes["stage_seconds"], notes["errors"]
        self.done = len(self.errors)

    def restore(self):
        """Assigns the weights that `load` read."""
        # A file keeps the order of its arrays, which is that of the variables.
        values = [x for name, x in self.arrays.items() if name.startswith("state")]
        if values:
            assign(self.state, values)
        self.optimizer_values = list(self.arrays.values())[len(values) :]

    def save(self, optimizer=None):
        """Saves a checkpoint, with the optimizer if a stage goes on."""
        if self.checkpoint is None:
            return
        arrays = {f"state{i}": x for i, x in enumerate(values_of(self.state))}
        if optimizer is not None:
            values = values_of(optimizer.variables)
            arrays |= {f"optimizer{i}": x for i, x in enumerate(values)}
        notes = {
            "before": self.before.tolist(),
            "control": self.control.tolist(),
            "results": [list(vars(result).values()) for result in self.results],
            "errors": self.errors,
            "seconds": self.seconds,
            "stage_seconds": self.seconds - self.stage_start,
        }
        self.checkpoint.save(self.identity, arrays, notes)

    def save_step(self, optimizer):
        """Saves a checkpoint if one is due after a step that is not a stage's last."""
        # The optimizer may still change weights when the stage ends.
        if self.checkpoint is not None and self.done < self.steps:
            if self.done % self.checkpoint.every == 0:
                self.save(optimizer)

    def begin(self, stage, first, steps):
        """Begins a stage, or goes on with one that was interrupted."""
        self.stage, self.first, self.steps, self.note = stage, first, steps, ""
        self.stage_start = self.seconds - self.stage_seconds
        self.good = self.latest = values_of(self.state)

    def end(self, trainer):
        """Ends a stage, also one that a callback stopped early."""
        count, seconds = len(self.errors), self.seconds - self.stage_start
        result = StageResult(self.stage.name, count, seconds, note=self.note)
        if count:
            tenth = max(1, count // 10)
            result = replace(
                result,
                first=float(np.mean(self.errors[:tenth])),
                last=float(np.mean(self.errors[-tenth:])),
                no_attention=trainer.no_attention,
                measure=trainer.measure,
            )
        self.results.append(result)
        self.done, self.errors, self.optimizer_values = 0, [], []
        self.stage_seconds, self.stage_start = 0.0, self.seconds
        self.save()

    def on_epoch_begin(self, epoch, logs=None):
        self.seen, self.total = 0, 0.0

    def on_train_batch_end(self, batch, logs=None):
        self.check(math.isfinite(logs["loss"]))
        # On JAX, reading `self.model` writes the trained values to its variables.
        model = self.model
        self.good, self.latest = self.latest, values_of(self.state)
        # Keras' logs are means over the steps of an epoch; differences give this step.
        self.seen, total = self.seen + 1, logs["error"] * (self.seen + 1)
        self.errors.append(float(total - self.total))
        self.done, self.total = self.done + 1, total
        if self.done == self.steps:
            # The last epoch may have fewer steps.
            model.stop_training = True

    def on_train_end(self, logs=None):
        self.check(all(np.all(np.isfinite(x)) for x in self.latest))

    def check(self, is_finite):
        """Raises `ValueError` if the loss or the weights of a step are not finite."""
        if is_finite:
            return
        raise ValueError(
            f"The loss of stage '{self.stage.name}' is not finite at its step "
            f"{self.done} (batch {self.first + self.done} of the data). The weights of "
            f"step {max(self.done - 1, 0)}, the last good ones, are kept. Look for NaN "
            "in that batch, or use a smaller learning rate."
        )
