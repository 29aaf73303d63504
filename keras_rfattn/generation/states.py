"""Selects and joins the batch rows of states, saves states, counts their bytes."""

import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import check_sizes
from keras_rfattn.generation.streaming import (
    check,
    check_state,
    check_type,
    is_decoder,
    keys_and_values,
    named_arrays,
)
from keras_rfattn.models.generation import Cache, decodes
from keras_rfattn.models.report import ADVISERS
from keras_rfattn.ops.state import Exact, Near, State
from keras_rfattn.ops.sums import Sums

FORMAT = 5
# Tokens for which reports count memory, where a model has no maximum.
LENGTH = 8192
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


# --- Bytes


class StateBytes(NamedTuple):
    """Memory for generation in bytes.

    Attributes:
        state: Size of the arrays in the model's state.
        softmax_cache: Size of what all layers would keep with softmax attention: the
            keys and values of every token.
    """

    state: int
    softmax_cache: int


def state_bytes(model, length, batch_size=1):
    """Returns the memory of a model's generation state, and of a softmax cache.

    Args:
        model: A KerasHub `CausalLM` with linear attention.
        length: Number of tokens per row for which softmax layers reserve keys and
            values. The state of linear layers does not depend on it.
        batch_size: Number of rows.

    Returns:
        A `StateBytes`. Its `state` is the size of all arrays in the state that
        `prefill(model, tokens, max_length=length)` returns.
    """
    check_sizes(length=length, batch_size=batch_size)
    stream = check(model)
    state = stream.blank()
    per_token = sum(map(_size, keys_and_values(state)))
    layers = [x for x in stream.sites if decodes(x)]
    cached = sum(_cache_size(x) for x in layers)
    return StateBytes(
        batch_size * (_size(state) + (length - 1) * per_token),
        batch_size * length * cached,
    )


def _cache_size(site):
    """Returns the bytes of the keys and values of one token in an attention layer."""
    heads, head_dim = site.linear_class._kv_shape(site.layer)
    return 2 * heads * head_dim * _item_size(site.layer.compute_dtype)


def _size(state):
    """Returns the bytes of all arrays in a nested structure."""
    leaves = keras.tree.flatten(state)
    return sum(math.prod(x.shape) * _item_size(x.dtype) for x in leaves)


def _item_size(dtype):
    name = keras.backend.standardize_dtype(dtype)
    # NumPy alone has no bfloat16.
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def _advise(model):
    """Returns a line for `describe_attention` on the memory of a decoder."""
    if not is_decoder(model):
        return []
    length = getattr(model.backbone, "max_sequence_length", None) or LENGTH
    state, cache = (_megabytes(x) for x in state_bytes(model, length))
    return [f"generating {length} tokens: a state of {state}, softmax's cache {cache}"]


def _megabytes(size):
    return f"{size / 1e6:.3g} MB"


ADVISERS.append(_advise)
