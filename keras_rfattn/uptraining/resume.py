"""Resumes training exactly: saves the state of a run, and matches it to a run."""

import json
import os
import pathlib

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_sizes
from keras_rfattn.backend.devices import backend_name
from keras_rfattn.feature_maps.weights import checksum
from keras_rfattn.layers.checks import title

FORMAT, FILE = 5, "uptrain.npz"


class Checkpoint(keras.callbacks.Callback):
    """Saves the progress of `uptrain`, and resumes it after an interruption.

    Pass it to `keras_rfattn.uptrain` in `callbacks`. A call that finds a checkpoint in
    the folder resumes from it, and ends with the weights of an uninterrupted run, bit
    for bit: the checkpoint holds the weights that change, the optimizer, the stage and
    the step, and the batch of a step depends on the seed and the step only. `seed=None`
    stands for 0 here.

    Args:
        folder: Path of a folder, which is created if needed.
        every: Number of steps between checkpoints. A stage that ends is saved too.

    Raises:
        ValueError: If an argument is invalid. In `uptrain`, before the model changes:
            if the folder holds a damaged checkpoint or one of another run. The message
            lists the settings that differ.

    Examples:
        >>> from keras_rfattn.uptraining import Checkpoint
        >>> callbacks = [Checkpoint("progress", every=50)]  # for `uptrain`
    """

    # Whether the file is deleted once the run is complete.
    is_temporary = False

    def __init__(self, folder: str | os.PathLike, every: int = 100) -> None:
        super().__init__()
        check_sizes(every=every)
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(
                f"`folder` must be a path. Received: folder={folder!r:.80}."
            )
        self.path, self.every = pathlib.Path(folder) / FILE, every

    def set_model(self, model):
        raise ValueError(
            "`Checkpoint` must be passed to `keras_rfattn.uptrain`. Received: `fit` of "
            f"{title(model)}. Use `keras.callbacks.BackupAndRestore` there."
        )

    def save(self, identity, arrays, notes):
        """Writes a checkpoint in place of the one before."""
        header = json.dumps({"identity": identity, "notes": notes}).encode()
        partial = self.path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, header=np.frombuffer(header, np.uint8), **arrays)
        os.replace(partial, self.path)

    def load(self, identity):
        """Returns `(arrays, notes)` of this run, or `None` if none is saved."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return None
        try:
            # Reading a member of the archive completely also verifies its checksum.
            with np.load(self.path) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(arrays.pop("header").tobytes())
        except Exception as error:
            # Which exception a damaged archive raises cannot be predicted.
            raise ValueError(
                f"The checkpoint must be intact. Received: '{self.path}', which is "
                f"damaged ({error}). Delete it to start anew."
            ) from None
        saved = header["identity"]
        differing = [
            x for x in {**saved, **identity} if saved.get(x) != identity.get(x)
        ]
        if differing:
            lines = "\n".join(
                f"  {x}: saved {saved.get(x)!r}, given {identity.get(x)!r}"
                for x in differing
            )
            raise ValueError(
                "`folder` of `Checkpoint` must not hold a checkpoint of another run. "
                f"Received: '{self.path}', which was saved with other settings:\n"
                f"{lines}\nUse another folder; or call `uptrain` with the saved "
                "settings, on the model as it was loaded then. New LoRA adapters, and "
                "a preprocessor that draws random numbers, need "
                "`keras.utils.set_random_seed` before each call."
            )
        return arrays, header["notes"]


def checked_callbacks(given):
    """Returns a list of Keras callbacks, and the `Checkpoint` among them or `None`."""
    given = [] if given is None else given
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    resuming = Checkpoint, keras.callbacks.BackupAndRestore
    found = [x for x in callbacks if isinstance(x, resuming)]
    wrong = [
        x
        for x in callbacks
        if not isinstance(x, keras.callbacks.Callback)
        or isinstance(x, keras.callbacks.ModelCheckpoint)
    ]
    if wrong or len(found) > 1:
        raise ValueError(
            "`callbacks` must be Keras callbacks, at most one of them a `Checkpoint` "
            "or `BackupAndRestore`, and none a `ModelCheckpoint`, because `fit` trains "
            f"the model of a stage here. Received: callbacks={wrong or found!r:.200}. "
            "Use `keras_rfattn.uptraining.Checkpoint` to resume after an interruption, "
            "and save your model when `uptrain` is done."
        )
    others = [x for x in callbacks if x not in found]
    if not found or isinstance(found[0], Checkpoint):
        return others, found[0] if found else None
    # `BackupAndRestore` itself knows no stages, and would load one into another.
    every = found[0].save_freq
    checkpoint = Checkpoint(found[0].backup_dir, 100 if every == "epoch" else every)
    checkpoint.is_temporary = found[0].delete_checkpoint
    return others, checkpoint


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
        "stages": list(map(repr, settings["stages"])),
    }
    if settings["optimizer"] is not None:
        config = keras.saving.serialize_keras_object(settings["optimizer"])
        values["optimizer"] = config["class_name"], config["config"]
    for i, layer in enumerate(layers):
        values[f"layer {i}"] = {
            "feature_map": feature_maps.serialize(layer.feature_map),
            **layer.options.config(),
            "dtype": layer.compute_dtype,
        }
    return json.loads(json.dumps(_without_names(values), default=repr))


def _without_names(config):
    """Returns a config without names, which Keras makes up anew in each process."""
    if isinstance(config, dict):
        return {k: _without_names(x) for k, x in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(x) for x in config]
    return config
