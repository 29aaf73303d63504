"""Exact resume: one file a checkpoint, put in place whole or not at all."""

import json
import os
import pathlib
import warnings

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps

FORMAT = 1
KEPT = 2  # files: were one torn, there is the one before it


class Checkpoints:
    """The state of a training in a folder, by stage and step.

    Args:
        folder: Where; made if it is not there. `None` to save nothing.
        identity: Dict of plain values that tells one training from another.
    """

    def __init__(self, folder, identity):
        self.folder = None if folder is None else pathlib.Path(folder)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    "`checkpoint_dir` must be a folder, or a path where one can be "
                    f"made. Received: checkpoint_dir={str(folder)!r} ({error})."
                ) from None
        self.identity = json.loads(json.dumps(identity))

    def save(self, position, arrays, notes):
        """Writes a checkpoint.

        Args:
            position: `(stage, step)`: index of the stage, steps of it that are done.
            arrays: Dict of NumPy arrays.
            notes: Plain values that come back with them.
        """
        if self.folder is None:
            return
        stage, step = position
        header = {"format": FORMAT, "identity": self.identity, "notes": notes,
                  "position": [stage, step], "arrays": [*arrays]}  # fmt: skip
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
        """`(position, arrays, notes)` of the newest checkpoint, `None` if none is.

        One that is torn, or of another training, is named in a warning and the one
        before it taken.

        Raises:
            ValueError: If the folder holds checkpoints of other trainings only.
        """
        foreign = []
        for path in reversed(self._files()):
            try:
                header, arrays = _read(path)
            except Exception as error:
                # Which one, of what is not an archive any more, is up to chance.
                warnings.warn(f"Checkpoint '{path}' is torn, and refused: {error}",
                              stacklevel=3)  # fmt: skip
                continue
            differs = self._differs(header)
            if not differs:
                return tuple(header["position"]), arrays, header["notes"]
            foreign.append(f"Checkpoint '{path}' is of another training: {differs}.")
            warnings.warn(foreign[-1], stacklevel=3)
        if foreign:
            raise ValueError(
                f"{' '.join(foreign)} Call `uptrain` as it was called then, on the "
                "model as it was loaded then, or use another folder. (A preprocessor "
                "that draws at random needs `keras.utils.set_random_seed` before "
                "either call.)"
            )
        return None

    def _files(self):
        if self.folder is None:
            return []
        return sorted(self.folder.glob("uptrain-*-*.npz"))

    def _differs(self, header):
        """In what a checkpoint's training differs from this one, as text."""
        if header.get("format") != FORMAT:
            return f"format {header.get('format')}, not {FORMAT}"
        theirs, ours = flat(header["identity"]), flat(self.identity)
        names = sorted(n for n in {*theirs, *ours} if theirs.get(n) != ours.get(n))
        found = (
            f"{n} was {theirs.get(n)!r:.60}, is {ours.get(n)!r:.60}" for n in names
        )
        return "; ".join(found)


def mechanism(layer):
    """What a linear attention layer computes by, as plain values."""
    found = feature_maps.serialize(layer.feature_map), layer.options.config()
    return [*map(without_names, found), layer.compute_dtype]


def flat(config, path=""):
    """Nested dicts as one, by names such as `"optimizer config learning_rate"`."""
    if not isinstance(config, dict):
        return {path: config}
    parts = (flat(x, f"{path} {k}".strip()) for k, x in config.items())
    return {k: x for part in parts for k, x in part.items()}


def without_names(config):
    """Without names, which are automatic and differ from one process to the next."""
    if isinstance(config, dict):
        return {k: without_names(x) for k, x in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [without_names(x) for x in config]
    return config


def as_plain(optimizer):
    """What an optimizer is made from, as plain values without automatic names."""
    found = keras.saving.serialize_keras_object(optimizer)
    kept = {k: found[k] for k in ("class_name", "config")}
    return json.loads(json.dumps(without_names(kept), default=repr))


def _read(path):
    # Whoever reads a member of the archive to its end has its checksum compared.
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("header").tobytes())
    if header["arrays"] != [*arrays]:
        raise ValueError("arrays are missing")
    return header, arrays


def state_of(variables):
    """Copies of values, as NumPy arrays by position."""
    return [np.array(ops.convert_to_numpy(v.value)) for v in variables]


def assign(variables, values):
    """Puts back what `state_of` gave."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
