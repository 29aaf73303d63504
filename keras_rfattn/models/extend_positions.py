"""Longer inputs than a checkpoint was trained on: extended position tables."""

import keras
import numpy as np
from keras import ops

METHODS = ("tile", "interpolate")


def extend_positions(model, max_length, method="tile"):
    """A copy of a model whose learned position table covers longer inputs.

    Linear attention pays at lengths that most checkpoints cannot take: BERT has
    512 positions, GPT-2 1024, a ViT its training grid. The copy is rebuilt from
    the model's config with a larger table; every other weight is copied, and
    replaced attention stays replaced.

    Args:
        model: A KerasHub backbone or task with learned absolute positions. It is
            left as it is.
        max_length: For text the new number of positions; for images the new
            `(height, width)` in pixels.
        method: `"tile"` repeats the table, so that every position keeps a trained
            embedding and neighbours stay neighbours; `"interpolate"` stretches it
            linearly (bilinearly for images, where class tokens keep theirs).

    Returns:
        A new model of the same class, with the same compilation state as a freshly
        built one.

    Raises:
        ValueError: If the model has no learned positions, or `max_length` or
            `method` is invalid.
        TypeError: If `model` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a KerasHub backbone or task. Received: "
            f"model={model!r} of type {type(model).__name__}."
        )
    if method not in METHODS:
        raise ValueError(
            f"`method` must be one of {METHODS}. Received: method={method!r}."
        )
    config = keras.saving.serialize_keras_object(model)
    for key in ("build_config", "compile_config"):
        _drop(config, key)
    inner = config["config"]
    changed = inner["backbone"]["config"] if "backbone" in inner else inner
    old = _resize(changed, max_length, type(model).__name__)
    extended = keras.saving.deserialize_keras_object(config)
    _copy_weights(model, extended, old, max_length, method)
    return extended


def _drop(config, key):
    if isinstance(config, dict):
        config.pop(key, None)
        for value in config.values():
            _drop(value, key)


def _resize(config, max_length, name):
    """Writes the new size into a backbone's config, and returns the old one."""
    if "max_sequence_length" in config and "image_shape" not in config:
        old = config["max_sequence_length"]
        if isinstance(max_length, bool) or not isinstance(max_length, int):
            valid = False
        else:
            valid = max_length >= old
        if not valid:
            raise ValueError(
                f"`max_length` must be an integer of at least {old}, the positions "
                f"that {name} has. Received: max_length={max_length!r}."
            )
        config["max_sequence_length"] = max_length
        return old
    if "image_shape" in config:
        shape = list(config["image_shape"])
        axes = _image_axes(shape, config.get("data_format"))
        old = tuple(shape[axis] for axis in axes)
        if (
            not isinstance(max_length, (tuple, list))
            or len(max_length) != 2
            or any(
                not isinstance(n, int) or n < o
                for n, o in zip(max_length, old, strict=True)
            )
        ):
            raise ValueError(
                f"`max_length` must be the new (height, width), at least {old}, the "
                f"image size that {name} has. Received: max_length={max_length!r}."
            )
        for axis, size in zip(axes, max_length, strict=True):
            shape[axis] = size
        config["image_shape"] = shape
        return old
    raise ValueError(
        f"`model` must have learned positions (`max_sequence_length` or "
        f"`image_shape` in its config). Received: {name}, with "
        f"{sorted(config)}. For a model of several encoders, extend each encoder."
    )


def _image_axes(shape, data_format):
    data_format = data_format or keras.config.image_data_format()
    first = data_format == "channels_first"
    return (1, 2) if first and len(shape) == 3 else (0, 1)


def _copy_weights(source, target, old, new, method):
    pairs = list(zip(source.variables, target.variables, strict=True))
    tables = [(a, b) for a, b in pairs if tuple(a.shape) != tuple(b.shape)]
    if not tables:
        raise ValueError(
            f"`model` must have learned positions. Received: {type(source).__name__}, "
            f"none of whose weights depends on its length (extending {old} to {new})."
        )
    for a, b in pairs:
        if tuple(a.shape) == tuple(b.shape):
            # A copy: on JAX both models would own one buffer, which `fit` donates.
            b.assign(ops.convert_to_numpy(a))
        elif "float" in keras.backend.standardize_dtype(a.dtype):
            table = np.asarray(ops.convert_to_numpy(a), dtype="float32")
            image = isinstance(new, (tuple, list))
            grow = _grow_grid if image else _grow_sequence
            b.assign(grow(table, b.shape, old, new, method))


def _grow_sequence(table, shape, old, new, method):
    """A table `(L, d)` grown to `(L', d)`; rows beyond `old` are an offset's."""
    extra, count = table[: len(table) - old], shape[0] - (len(table) - old)
    rows = table[len(table) - old :]
    if method == "tile":
        grown = rows[np.arange(count) % old]
    else:
        places = np.linspace(0, old - 1, count)
        grown = np.stack(
            [np.interp(places, np.arange(old), column) for column in rows.T], axis=1
        )
    return np.concatenate([extra, grown])


def _grow_grid(table, shape, old, new, method):
    """A table of class tokens and a grid of patches, grown to a larger grid."""
    rows, wanted = table.reshape(-1, table.shape[-1]), int(np.prod(shape[:-1]))
    patch = _patch_size(len(rows), wanted, old, new)
    (h, w), (h2, w2) = [(n[0] // patch, n[1] // patch) for n in (old, new)]
    prefix = len(rows) - h * w
    grid = rows[prefix:].reshape(h, w, -1)
    if method == "tile":
        grown = grid[np.arange(h2) % h][:, np.arange(w2) % w]
    else:
        grown = ops.convert_to_numpy(
            ops.image.resize(grid[None], (h2, w2), interpolation="bilinear")
        )[0]
    grown = np.concatenate([rows[:prefix], grown.reshape(h2 * w2, -1)])
    return grown.reshape(shape)


def _patch_size(rows, wanted, old, new):
    """The patch size at which both tables have the same number of class tokens."""
    for patch in range(1, min(old) + 1):
        prefix = rows - (old[0] // patch) * (old[1] // patch)
        if 0 <= prefix <= 8 and any(
            n // patch != o // patch for n, o in zip(new, old, strict=True)
        ):
            if wanted - (new[0] // patch) * (new[1] // patch) == prefix:
                return patch
    raise ValueError(
        f"A position table of {rows} rows does not fit an image of {old} pixels, "
        f"or {wanted} rows one of {new}. Extend a model with a square patch."
    )
