"""Resumes training exactly: delays interrupts, and matches a checkpoint to a run."""

import contextlib
import json
import os
import pathlib
import signal
import threading
from dataclasses import asdict

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_sizes
from keras_rfattn.backend.devices import backend_name
from keras_rfattn.feature_maps.weights import checksum
from keras_rfattn.layers.checks import title

FORMAT, FILE = 4, "uptrain.npz"
LONGEST = 300  # maximum number of characters of a value in an error message


class Interrupts(keras.callbacks.Callback):
    """Holds back the first interrupt to the end of a step; a second raises at once.

    On JAX, a step that is interrupted leaves the model without weights, because JAX
    reuses (donates) their memory for the new ones.
    """

    is_pending = False

    def on_train_batch_end(self, batch, logs=None):
        if self.is_pending:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self):
        """Context manager that holds an interrupt back until the `with` block ends."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_main else None
        # Only the main thread can set a handler, and a custom handler for Ctrl-C stays
        # in charge.
        if before is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.is_pending:
            raise KeyboardInterrupt

    def _hold(self, number, frame):
        if self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True


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
            if the folder cannot be created, or if it holds a damaged checkpoint or one
            of another run. The message lists the settings that differ.

    Examples:
        >>> from keras_rfattn.uptraining import Checkpoint
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "hedgehog")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> callbacks = [Checkpoint("progress", every=1)]
        >>> options = {"steps": 2, "batch_size": 4, "verbose": 0}
        >>> report = keras_rfattn.uptrain(model, x, callbacks=callbacks, **options)
    """

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

    def save(self, identity, position, arrays, notes):
        """Writes a checkpoint in place of the one before."""
        header = {
            "format": FORMAT,
            "identity": identity,
            "position": position,
            "notes": notes,
        }
        header = np.frombuffer(json.dumps(header).encode(), np.uint8)
        partial = self.path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, header=header, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def load(self, identity):
        """Returns `(position, arrays, notes)` of this run, `None` if none is saved."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                "`folder` of `Checkpoint` must be a folder, or a path where one can be "
                f"made. Received: folder={str(folder)!r} ({error})."
            ) from None
        if not self.path.exists():
            return None
        try:
            header, arrays = _read(self.path)
        except Exception as error:
            # Which exception a damaged archive raises cannot be predicted.
            raise ValueError(
                f"The checkpoint must be intact. Received: '{self.path}', which is "
                f"damaged ({error}). Delete it to start anew."
            ) from None
        saved = {"format": header.get("format"), **header.get("identity", {})}
        lines = _differences(saved, {"format": FORMAT, **identity})
        if lines:
            text = "\n".join(f"  {line}" for line in lines)
            raise ValueError(
                "`folder` of `Checkpoint` must not hold a checkpoint of another run. "
                f"Received: '{self.path}', which was saved with other settings:\n"
                f"{text}\nUse another folder; or call `uptrain` with the saved "
                "settings, on the model as it was loaded then. A preprocessor that "
                "draws random numbers needs `keras.utils.set_random_seed` before each "
                "call."
            )
        return tuple(header["position"]), arrays, header["notes"]


def _read(path):
    # Reading a member of the archive completely also verifies its checksum.
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(arrays.pop("header").tobytes()), arrays


def identity(model, layers, trained, batches, settings):
    """Returns the values that a run shares with its checkpoints, as JSON values."""
    others = {id(v) for layer in layers for v in layer.feature_map.variables}
    shapes = [list(v.shape) for v in trained]
    own = [v for v in model.weights if id(v) not in others]
    values = {
        "backend": backend_name(),
        "softmax weights (checksum)": checksum(v.value for v in own),
        "first batch of data (checksum)": checksum(keras.tree.flatten(batches(0))),
        "shapes of trained weights": shapes,
        "layer": {str(i): _mechanism(layer) for i, layer in enumerate(layers)},
        "optimizer": _optimizer_config(settings.optimizer),
        "stage": {stage.name: asdict(stage) for stage in settings.stages},
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
    return json.loads(json.dumps(values, default=repr))


def _differences(saved, given):
    """Returns a list of lines that describe how two identities differ."""
    saved, given = _flat(saved), _flat(given)
    # Dict from `(name, saved value, given value)` to the indices of layers.
    lines = {}
    for name in {**saved, **given}:
        if name in saved and name in given and saved[name] == given[name]:
            continue
        values = [
            f"{config[name]!r:.{LONGEST}}" if name in config else "nothing"
            for config in (saved, given)
        ]
        if name.startswith("layer "):
            layer, _, name = name.removeprefix("layer ").partition(" ")
            lines.setdefault((name, *values), []).append(layer)
        else:
            lines[name, *values] = []
    return [
        name
        + (f" of layers {', '.join(layers)}" if layers else "")
        + f": saved {before}, given {after}"
        for (name, before, after), layers in lines.items()
    ]


def _flat(config, path=""):
    """Flattens nested dicts to keys such as `"optimizer config learning_rate"`."""
    if isinstance(config, list) and any(isinstance(x, dict) for x in config):
        config = {str(i): x for i, x in enumerate(config)}
    if not isinstance(config, dict):
        return {path: config}
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{path} {key}".strip())
    return flat


def _mechanism(layer):
    """Returns the map and the options of a linear attention layer as JSON values."""
    return {
        "feature_map": _without_names(feature_maps.serialize(layer.feature_map)),
        **_without_names(layer.options.config()),
        "dtype": layer.compute_dtype,
    }


def _optimizer_config(optimizer):
    """Returns the config of an optimizer, or `None` for the default one."""
    if optimizer is None:
        return None
    config = keras.saving.serialize_keras_object(optimizer)
    return _without_names({name: config[name] for name in ("class_name", "config")})


def _without_names(config):
    """Returns a config without names, which Keras makes up anew in each process."""
    if isinstance(config, dict):
        return {k: _without_names(x) for k, x in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(x) for x in config]
    return config
