"""Resumes training exactly: saves the state of a run, and matches it to a run."""

import json
import os
import pathlib

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.backend.devices import backend_name
from keras_rfattn.feature_maps.weights import checksum

FORMAT, FILE = 6, "uptrain.npz"


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
