"""Selects and joins the batch rows of states, and saves states to files."""

import keras
import numpy as np
from keras import ops

from keras_rfattn.generation.streaming import (
    check,
    check_state,
    check_type,
    named_arrays,
)
from keras_rfattn.models.generation import Cache
from keras_rfattn.ops.state import Exact, Near, State
from keras_rfattn.ops.sums import Sums

FORMAT = 5
PARTS = {"far": Sums, "leaving": Sums, "near": Near, "exact": Exact}


def take_rows(state, rows):
    """Selects batch rows of a state, in any order; rows may be dropped or repeated.

    Args:
        state: A `Cache`.
        rows: List or 1D array of integers. Row `i` of the result is row `rows[i]` of
            `state`; negative numbers count from the end.

    Returns:
        A `Cache` with `len(rows)` rows.
    """
    check_type(state)
    rows, count = np.asarray(rows), ops.shape(state.seen)[0]
    is_index = rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer)
    if not is_index or not np.all((rows >= -count) & (rows < count)):
        raise ValueError(
            f"`rows` must be integers, positions among the {count} rows of the state. "
            f"Received: rows={rows.tolist()!r:.80}."
        )
    rows = ops.convert_to_tensor(rows.astype("int32") % count)
    return keras.tree.map_structure(lambda x: ops.take(x, rows, axis=0), state)


def join_rows(states):
    """Concatenates the batch rows of several states of one model.

    Args:
        states: List of `Cache`.

    Returns:
        A `Cache` with all rows, in the order of `states`.

    Raises:
        ValueError: If the states belong to different models.
    """
    if isinstance(states, Cache) or not isinstance(states, (list, tuple)):
        raise TypeError(
            "`states` must be a list of states that `keras_rfattn.generation.prefill` "
            f"returned. Received: {type(states).__name__}."
        )
    for state in states:
        check_type(state)
    kinds = [_kind(x) for x in states]
    if not states or any(x != kinds[0] for x in kinds):
        raise ValueError(
            "`states` must be states of one model, at least one. Received: "
            f"{len(states)} states" + (" of different models." if states else ".")
        )
    return keras.tree.map_structure(lambda *x: ops.concatenate(x, axis=0), *states)


def _kind(state):
    """Returns what states of a model share: layers, shapes and the model checksum."""
    leaves = keras.tree.flatten(state._replace(model=0))
    shapes = [(tuple(x.shape[1:]), str(x.dtype)) for x in leaves if hasattr(x, "shape")]
    return sorted(state.layers), shapes, set(np.unique(_array(state.model)).tolist())


def save(path, state):
    """Writes a state to an `.npz` file, bit for bit.

    Args:
        path: Path of the file.
        state: A `Cache`.
    """
    check_type(state)
    arrays = {"format": np.array(FORMAT), "seen": _array(state.seen),
              "model": _array(state.model)}  # fmt: skip
    for name, x in named_arrays(state).items():
        dtype = keras.backend.standardize_dtype(x.dtype)
        arrays[f"{name}:{dtype}"] = _array(x)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load(path, model):
    """Reads a state that `save` wrote, without unpickling any object.

    Args:
        path: Path of the file.
        model: The model that will continue from the state.

    Returns:
        A `Cache`.

    Raises:
        ValueError: If the file does not hold a state, has another format version, or
            belongs to another model.
    """
    stream = check(model)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        version = arrays.pop("format").item()
        if version == FORMAT:
            given = [arrays.pop(name) for name in ("seen", "model")]
            for x in given:
                if x.ndim != 1 or x.dtype != np.int32 or np.any(x < 0):
                    raise ValueError("positions and marks are no counts")
            seen, model_mark = map(ops.convert_to_tensor, given)
            bad = [k for k, x in arrays.items() if not np.all(np.isfinite(x))]
            if bad:
                raise ValueError(f"{bad[0]} is not finite")
        else:
            arrays = {}
        layers = {}
        for key, x in arrays.items():
            name, dtype = key.split(":")
            place, names = layers, name.split("/")
            for part in names[:-1]:
                place = place.setdefault(part, {})
            place[names[-1]] = ops.cast(ops.convert_to_tensor(x), dtype)
        layers = {i: _entry(x) for i, x in layers.items()}
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"'{path}' must be a state that `keras_rfattn.generation.save` wrote. "
            f"Received: a file that cannot be read so ({error!r})."
        ) from error
    if version != FORMAT:
        raise ValueError(
            f"'{path}' must be a state of format {FORMAT}. Received: format {version}. "
            "Use the version of keras_rfattn that saved it."
        )
    state = Cache(seen, layers, model_mark)
    check_state(stream, state, seen.shape[0])
    return state


def _entry(parts):
    """Returns an entry of `Cache.layers` from its arrays by name."""
    if not isinstance(parts, dict):
        return parts
    nested = {k: PARTS[k](**x) if k in PARTS else x for k, x in parts.items()}
    return State(**nested)


def _array(x):
    # NumPy has no bfloat16. float32 holds the values exactly, and the array's name in
    # the file records the dtype.
    is_short = keras.backend.standardize_dtype(x.dtype) == "bfloat16"
    return ops.convert_to_numpy(ops.cast(x, "float32") if is_short else x)
