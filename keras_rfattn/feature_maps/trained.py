"""Detects whether training has changed a feature map since the library set its weights.

Training sets no flag; weights are compared instead. A map that measures data keeps a
checksum of the weights after `adapt`. The weights of any other map are compared with
those that its seed and its number of draws determine.
"""

import contextlib
import zlib

import numpy as np
from keras import ops

# Tolerance relative to the largest entry, because platforms round random draws
# differently.
TOLERANCE = 1e-5


def trained_weights(feature_map):
    """Returns the trained variables of a map and its inner maps, even if frozen."""
    layers = feature_map._flatten_layers()
    return [v for layer in layers for v in layer._trainable_variables]


def checksum(arrays):
    """Returns a 32-bit checksum of the entries of all arrays."""
    total = 0
    for array in arrays:
        array = np.ascontiguousarray(as_numpy(array))
        total = zlib.crc32(array.reshape(-1).view(np.uint8), total)
    return total


def mark_of(feature_map):
    """Returns a positive int32 that changes if a trained weight of the map changes."""
    weights = trained_weights(feature_map)
    return checksum(v.value for v in weights) & 0x7FFFFFFF or 1


def mark(feature_map):
    """Records that the trained weights have the values that the library set."""
    for part in feature_map._flatten_layers():
        updates = getattr(part, "updates", None)
        if updates is not None and trained_weights(part) and integer(updates):
            updates.assign(mark_of(part))


def as_drawn(feature_map):
    """Returns a copy of a built map as it was before training and calibration."""
    copy = type(feature_map).from_config(feature_map.get_config())
    copy.build((None, None, feature_map.num_heads, feature_map.head_dim))
    parts = zip(copy._flatten_layers(), feature_map._flatten_layers(), strict=True)
    for part, original in parts:
        draws = getattr(original, "draws", None)
        if draws is not None and integer(draws):
            part.assign_vectors(integer(draws))
            part.draws.assign(draws)
    return copy


def is_as_drawn(feature_map):
    """Whether the trained weights of a built map equal those of `as_drawn`."""
    weights = trained_weights(feature_map)
    if not weights:
        return True
    pairs = zip(weights, trained_weights(as_drawn(feature_map)), strict=True)
    return all(_is_close(as_numpy(a.value), as_numpy(b.value)) for a, b in pairs)


def check_untrained(feature_map, discard_training, method):
    """Raises `ValueError` if a map was trained, unless `discard_training` is true."""
    if feature_map.was_trained and not discard_training:
        raise ValueError(
            f"`{method}` would replace weights of {type(feature_map).__name__} that "
            f"were trained. Received: discard_training={discard_training!r}. Use "
            "discard_training=True to discard the training."
        )


def start_anew(feature_map):
    """Resets a map's weights to their values before training and calibration."""
    pairs = zip(feature_map.weights, as_drawn(feature_map).weights, strict=True)
    for weight, first in pairs:
        weight.assign(first)


@contextlib.contextmanager
def unchanged_on_error(feature_maps):
    """Context manager that restores the weights of built maps if its block raises."""
    weights = [w for feature_map in feature_maps for w in feature_map.weights]
    before = [np.array(as_numpy(w.value)) for w in weights]
    try:
        yield
    except BaseException:
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value)
        raise


def _is_close(a, b):
    return np.max(np.abs(a - b), initial=0) <= TOLERANCE * np.max(np.abs(b), initial=0)


def as_numpy(array):
    """Converts a tensor, or the value of a variable, to a NumPy array."""
    if array.shape == ():
        # NumPy cannot convert scalar variables of TensorFlow's distribution strategies.
        return ops.convert_to_numpy(ops.reshape(array, (1,)))[0]
    return ops.convert_to_numpy(array)


def integer(variable):
    """Returns the value of a scalar variable as an integer."""
    return int(as_numpy(variable.value))
