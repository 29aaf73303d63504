"""The progress of a run of `uptrain`, kept in memory and in checkpoints."""

import json
import math
import os
import pathlib
import time

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.backend.devices import backend_name, donates_weights
from keras_rfattn.feature_maps.weights import assign, checksum, values_of

FORMAT, FILE = 6, "uptrain.npz"
# Attributes of `Progress` that checkpoints hold, besides values and the duration.
SAVED = "before", "control", "results", "errors", "stage_start"


class Progress(keras.callbacks.Callback):
    """Callback that keeps errors of steps and the last good weights, and saves them."""

    def __init__(self, model, layers, trained):
        super().__init__()
        of_maps = [v for layer in layers for v in layer.feature_map.variables]
        changing = {id(v) for v in [*trained, *of_maps]}
        # Checkpoints hold these; all other weights are the teacher's and never change.
        self.state = [v for v in model.variables if id(v) in changing]
        others = [v for v in model.variables if id(v) not in changing]
        self.frozen = others if donates_weights() else []
        self.frozen_values = values_of(self.frozen)
        # Values with which the last finite loss was computed, and values after the last
        # step, whose loss is unknown yet.
        self.good = self.latest = values_of(self.state)
        self.backup = self.identity = None
        # Errors before training and of uniform attention; arguments of `StageResult`.
        self.before, self.control, self.results = None, None, []
        # Errors of the steps of the current stage, and the optimizer to resume with.
        self.errors, self.optimizer_values = [], []
        self.start, self.stage_start = time.perf_counter(), 0.0

    @property
    def seconds(self):
        """Duration of the run so far, without interruptions."""
        return time.perf_counter() - self.start

    def restore(self):
        """Gives the model its last good weights, after an error."""
        assign([*self.state, *self.frozen], [*self.good, *self.frozen_values])

    def load(self, backup, identity):
        """Restores what the checkpoint of this run holds, if there is one."""
        self.backup, self.identity = backup, identity
        self.every = 100 if backup.save_freq == "epoch" else max(1, backup.save_freq)
        values, notes = load(backup, identity)
        if not notes:
            return
        count = len(self.state)
        assign(self.state, values[:count])
        self.optimizer_values = values[count:]
        self.start -= notes.pop("seconds")
        vars(self).update(notes)

    def save(self, optimizer_variables=()):
        """Saves a checkpoint, with the optimizer if a stage goes on."""
        values = values_of([*self.state, *optimizer_variables])
        notes = {"seconds": self.seconds} | {x: getattr(self, x) for x in SAVED}
        save(self.backup, self.identity, values, notes)

    def begin(self, stage, first, steps):
        """Begins a stage, or goes on with one that was interrupted."""
        self.stage, self.first, self.steps = stage, first, steps
        self.stage_start = self.stage_start if self.errors else self.seconds
        self.good = self.latest = values_of(self.state)

    def end(self, trainer, note):
        """Ends a stage, also one that a callback stopped early."""
        errors, seconds = self.errors, self.seconds - self.stage_start
        result = {"name": self.stage.name, "steps": len(errors), "seconds": seconds}
        if errors:
            tenth = max(1, len(errors) // 10)
            result["first"] = float(np.mean(errors[:tenth]))
            result["last"] = float(np.mean(errors[-tenth:]))
            result["no_attention"] = trainer.no_attention
            result["measure"] = trainer.measure
        self.results.append({**result, "note": note})
        self.errors, self.optimizer_values = [], []
        if self.backup is not None:
            self.save()

    def on_train_batch_end(self, batch, logs=None):
        self.check(math.isfinite(logs["loss"]))
        # On JAX, reading `self.model` writes the trained values to its variables.
        model = self.model
        self.good, self.latest = self.latest, values_of(self.state)
        # Keras' logs are means over the steps of an epoch; differences give this step.
        before = self.total if batch else 0.0
        self.total = logs["error"] * (batch + 1)
        self.errors.append(float(self.total - before))
        if len(self.errors) == self.steps:
            # The last epoch may have fewer steps. Nothing is saved yet, as the
            # optimizer may change weights once more when the stage ends.
            model.stop_training = True
        elif self.backup is not None and len(self.errors) % self.every == 0:
            self.save(model.optimizer.variables)

    def on_train_end(self, logs=None):
        self.check(all(np.all(np.isfinite(x)) for x in self.latest))

    def check(self, is_finite):
        """Raises `ValueError` if the loss or the weights of a step are not finite."""
        if is_finite:
            return
        step = len(self.errors)
        raise ValueError(
            f"The loss of stage '{self.stage.name}' is not finite at its step {step} "
            f"(batch {self.first + step} of the data). The weights of step "
            f"{max(step - 1, 0)}, the last good ones, are kept. Look for NaN in that "
            "batch, or use a smaller learning rate."
        )


# --- Checkpoints


def path_of(backup):
    """Returns the path of the checkpoint of a `BackupAndRestore`."""
    return pathlib.Path(backup.backup_dir) / FILE


def save(backup, identity, values, notes):
    """Writes a checkpoint in place of the one before."""
    path = path_of(backup)
    header = json.dumps({"identity": identity, "notes": notes}).encode()
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, *values, header=np.frombuffer(header, np.uint8))
    os.replace(partial, path)


def load(backup, identity):
    """Returns `(values, notes)` of this run, which are empty if none is saved."""
    path = path_of(backup)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return [], {}
    try:
        # Reading a member of the archive completely also verifies its checksum.
        with np.load(path) as file:
            header, *values = [file[name] for name in file.files]
        header = json.loads(header.tobytes())
    except Exception as error:
        # Which exception a damaged archive raises cannot be predicted.
        raise ValueError(
            f"The checkpoint must be intact. Received: '{path}', which is damaged "
            f"({error}). Delete it to start anew."
        ) from None
    saved = header["identity"]
    lines = [
        f"\n  {x}: saved {saved.get(x)!r}, given {identity.get(x)!r}"
        for x in {**saved, **identity}
        if saved.get(x) != identity.get(x)
    ]
    if lines:
        raise ValueError(
            "`BackupAndRestore` must not find a checkpoint of another run. "
            f"Received: '{path}', which was saved with other settings:{''.join(lines)}"
            "\nUse another folder; or call `uptrain` with the saved settings, on the "
            "model as it was loaded then. New LoRA adapters, and a preprocessor that "
            "draws random numbers, need `keras.utils.set_random_seed` before each call."
        )
    return values, header["notes"]


def checked_callbacks(given):
    """Returns a list of callbacks, and the `BackupAndRestore` among them or `None`."""
    callbacks = [] if given is None else given
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    # Keras' own way to back up knows no stages, and would load one into another.
    backups = [x for x in callbacks if isinstance(x, keras.callbacks.BackupAndRestore)]
    wrong = [x for x in callbacks if not isinstance(x, keras.callbacks.Callback)]
    wrong += [x for x in callbacks if isinstance(x, keras.callbacks.ModelCheckpoint)]
    if wrong or len(backups) > 1:
        raise ValueError(
            "`callbacks` must be Keras callbacks, at most one of them a "
            "`BackupAndRestore`, and none a `ModelCheckpoint`, because `fit` trains "
            f"the model of a stage here. Received: {wrong or backups!r:.200}. "
            "Use `BackupAndRestore` to resume after an interruption, and save your "
            "model when `uptrain` is done."
        )
    return [x for x in callbacks if x not in backups], next(iter(backups), None)


def identity(model, layers, batches, settings):
    """Returns what a run shares with its checkpoints: a dict of JSON values."""
    of_maps = {id(v) for layer in layers for v in layer.feature_map.variables}
    own = [v for v in model.weights if id(v) not in of_maps]
    values = {
        "format": FORMAT,
        "backend": backend_name(),
        "softmax weights (checksum)": checksum(v.value for v in own),
        "first batch of data (checksum)": checksum(keras.tree.flatten(batches(0))),
        **settings,
    }
    if (optimizer := settings["optimizer"]) is not None:
        values["optimizer"] = type(optimizer).__name__, optimizer.get_config()
    for i, layer in enumerate(layers):
        feature_map = feature_maps.serialize(layer.feature_map)
        config = {"feature_map": feature_map, "dtype": layer.compute_dtype}
        values[f"layer {i}"] = config | layer.options.config()
    # Keras makes up names anew in each process.
    return json.loads(
        json.dumps(values, default=repr),
        object_hook=lambda x: {k: value for k, value in x.items() if k != "name"},
    )
