"""Checkpoints for exact resume: one file each, written completely or not at all."""

import json
import os
import pathlib
import warnings

import numpy as np

from keras_rfattn.feature_maps.trained import as_numpy
from keras_rfattn.uptraining.identity import differences

FORMAT = 2
KEPT = 2  # number of files: if the newest is damaged, the one before it remains


class Checkpoints:
    """Saves and loads the state of a training in a folder.

    Args:
        folder: Path of the folder, which is created if needed. `None` saves nothing.
        identity: Dict of plain values that distinguishes one training from another.

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
        self.identity = json.loads(json.dumps(identity))

    def save(self, position, arrays, notes):
        """Writes a checkpoint.

        Args:
            position: `(stage, step)`: the index of the stage, and the number of its
                steps that are done.
            arrays: Dict of NumPy arrays.
            notes: Dict of plain values that is saved with the arrays.
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
        """Loads the newest checkpoint of this training.

        A damaged file causes a warning and is skipped. A checkpoint of another training
        is skipped with a warning if an older checkpoint belongs to this training.

        Returns:
            `(position, arrays, notes)` as they were saved, or `None` if the folder has
            no checkpoint.

        Raises:
            ValueError: If the folder holds checkpoints of other trainings only.
        """
        foreign = None
        for path in reversed(self._files()):
            try:
                header, arrays = _read(path)
            except Exception as error:
                # Which exception a damaged archive raises cannot be predicted.
                warnings.warn(f"Checkpoint '{path}' is damaged, and skipped: {error}",
                              stacklevel=3)  # fmt: skip
                continue
            lines = self._differs(header)
            if lines:
                foreign = foreign or (path, "\n".join(f"  {x}" for x in lines))
                continue
            if foreign:
                warnings.warn("Checkpoint '{}' belongs to another training:\n{}".format(
                              *foreign), stacklevel=3)  # fmt: skip
            return tuple(header["position"]), arrays, header["notes"]
        if foreign:
            raise ValueError(
                "`checkpoint_dir` must not hold checkpoints of another training. "
                f"Received: '{foreign[0]}', which was saved with other settings:\n"
                f"{foreign[1]}\nUse another folder; or call `uptrain` with the saved "
                "settings (`steps` may be larger), on the model as it was loaded then. "
                "A preprocessor that draws random numbers needs "
                "`keras.utils.set_random_seed` before each call."
            )
        return None

    def _files(self):
        if self.folder is None:
            return []
        return sorted(self.folder.glob("uptrain-*-*.npz"))

    def _differs(self, header):
        """Returns lines that say how a checkpoint differs from this training."""
        if header.get("format") != FORMAT:
            return [f"format: saved {header.get('format')!r}, given {FORMAT!r}"]
        return differences(header["identity"], self.identity)


def extended(rounds, steps):
    """Returns the rounds of a run that is extended to more steps.

    Args:
        rounds: List with the steps of the first call, then those of each extension.
        steps: Total number of steps that this call asks for.

    Returns:
        List of steps by round. A new round is added if `steps` exceeds the old total.

    Raises:
        ValueError: If the run already has more steps.
    """
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


def state_of(variables):
    """Returns copies of the values of variables as a list of NumPy arrays."""
    return [np.array(as_numpy(v.value)) for v in variables]


def assign(variables, values):
    """Assigns values, as `state_of` returns them, to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
