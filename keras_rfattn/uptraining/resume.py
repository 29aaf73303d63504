"""Resumes training exactly: delays interrupts, and matches checkpoints to a run."""

import contextlib
import json
import os
import pathlib
import signal
import threading
import warnings

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.backend.devices import backend_name
from keras_rfattn.feature_maps.weights import checksum
from keras_rfattn.uptraining.weights import fresh_adapters

FORMAT = 3
KEPT = 2  # number of files: if the newest is damaged, the one before it remains
LONGEST = 300  # maximum number of characters of a value in an error message
# Settings that distinguish one training from another. The number of steps does not,
# because a run may be extended.
SETTINGS = (
    "stages", "trainable", "objective", "window_dropout", "seed", "batch_size",
    "max_rows",
)  # fmt: skip


class Interrupts:
    """Holds back the first interrupt; a second one raises at once.

    On JAX, a step that is interrupted leaves the model without weights, because JAX
    reuses (donates) their memory for the new ones.

    Attributes:
        is_pending: Whether an interrupt is being held back.
    """

    is_pending = False

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


class Checkpoints:
    """Saves and loads the state of a training in a folder.

    Args:
        folder: Path of the folder, which is created if needed. `None` saves nothing.
        identity: Dict that distinguishes one training from another, as `identity`
            returns it.

    Raises:
        ValueError: If the folder cannot be created.
    """

    def __init__(self, folder, identity):
        self.folder = None if folder is None else pathlib.Path(folder)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    "`checkpoint_dir` must be a folder, or a path where a folder can "
                    f"be made. Received: checkpoint_dir={str(folder)!r} ({error})."
                ) from None
        self.identity = json.loads(json.dumps(identity, default=repr))

    def save(self, position, arrays, notes):
        """Writes a checkpoint."""
        if self.folder is None:
            return
        stage, step = position
        header = {
            "format": FORMAT,
            "identity": self.identity,
            "notes": notes,
            "position": [stage, step],
            "arrays": [*arrays],
        }
        header = np.frombuffer(json.dumps(header).encode(), np.uint8)
        path = self.folder / f"uptrain-{stage:03d}-{step:07d}.npz"
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, header=header, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        for old in self._files()[:-KEPT]:
            old.unlink(missing_ok=True)

    def load(self):
        """Loads the newest checkpoint of this training."""
        foreign = None
        for path in reversed(self._files()):
            try:
                header, arrays = _read(path)
            except Exception as error:
                # Which exception a damaged archive raises cannot be predicted.
                warnings.warn(
                    f"Checkpoint '{path}' is damaged, and is skipped: {error}",
                    stacklevel=3,
                )
                continue
            lines = self._differences(header)
            if lines:
                foreign = foreign or (path, "\n".join(f"  {line}" for line in lines))
                continue
            if foreign:
                other, text = foreign
                warnings.warn(
                    f"Checkpoint '{other}' belongs to another training, and is "
                    f"skipped:\n{text}",
                    stacklevel=3,
                )
            return tuple(header["position"]), arrays, header["notes"]
        if foreign:
            other, text = foreign
            raise ValueError(
                "`checkpoint_dir` must not hold checkpoints of another training. "
                f"Received: '{other}', which was saved with other settings:\n"
                f"{text}\nUse another folder; or call `uptrain` with the saved "
                "settings (`steps` may be larger), on the model as it was loaded then. "
                "A preprocessor that draws random numbers needs "
                "`keras.utils.set_random_seed` before each call."
            )
        return None

    def _files(self):
        if self.folder is None:
            return []
        return sorted(self.folder.glob("uptrain-*-*.npz"))

    def _differences(self, header):
        """Returns lines that say how a checkpoint differs from this training."""
        if header.get("format") != FORMAT:
            return [f"format: saved {header.get('format')!r}, given {FORMAT!r}"]
        return _differences(header["identity"], self.identity)


def extended(rounds, steps):
    """Returns the rounds of a run that is extended to more steps."""
    total = sum(rounds)
    if steps < total:
        raise ValueError(
            f"`steps` must be {total} or more, because the run in `checkpoint_dir` has "
            f"{total} steps. Received: steps={steps}. A run can be extended but not "
            "shortened; use another folder for a shorter run."
        )
    return [*rounds, steps - total] if steps > total else list(rounds)


def _read(path):
    # Reading a member of the archive completely also verifies its checksum.
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("header").tobytes())
    if header["arrays"] != [*arrays]:
        raise ValueError("arrays are missing")
    return header, arrays


def identity(model, layers, trained, batches, settings):
    """Returns the values that a training shares with its checkpoints."""
    others = {id(v) for layer in layers for v in layer.feature_map.variables}
    shapes = [list(v.shape) for v in trained]
    if settings.adds_adapters:
        # Fresh adapters are left out of the checksum, because they are random but do
        # not change the softmax model. Their rank stands in for their shapes, because
        # they do not exist yet when checkpoints are first read.
        others |= {id(v) for v in fresh_adapters(model)}
        shapes = settings.lora_rank
    own = [v for v in model.weights if id(v) not in others]
    return {
        "backend": backend_name(),
        "softmax weights (checksum)": checksum(v.value for v in own),
        "first batch of data (checksum)": checksum(keras.tree.flatten(batches(0))),
        "shapes of trained weights, or lora_rank": shapes,
        "layer": {str(i): _mechanism(layer) for i, layer in enumerate(layers)},
        "optimizer": _optimizer_config(settings.optimizer),
        **{name: getattr(settings, name) for name in SETTINGS},
    }


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
