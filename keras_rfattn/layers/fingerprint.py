"""A mark in saved weights that says which mechanism they belong to.

Keras rebuilds many models from hyper-parameters, as softmax, and its loader skips
saved weights that the rebuilt layer has no place for if it meets the layer by a
second path. The mark is therefore stored beside the query projection's own arrays:
a softmax layer finds one array too many there and refuses, a replaced layer
compares, and a softmax checkpoint, without a mark, loads as it always did.
"""

import functools
import zlib

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.function import essence

KEY = "attention_fingerprint"


def fingerprint(feature_map):
    """A 31-bit checksum of what a map computes, whatever its seed and name."""
    return zlib.crc32(repr(essence(feature_map)).encode()) & 0x7FFFFFFF


def mark(layer):
    """Makes a built linear attention layer save and check its fingerprint."""
    projection = layer._query_dense
    projection.save_own_variables = functools.partial(_save, projection, layer)
    projection.load_own_variables = functools.partial(_load, projection, layer)


def unmark(layer):
    """Undoes `mark`."""
    for name in ("save_own_variables", "load_own_variables"):
        vars(layer._query_dense).pop(name, None)


def _save(projection, layer, store):
    type(projection).save_own_variables(projection, store)
    store[KEY] = np.asarray(fingerprint(layer.feature_map), dtype="int32")


def _load(projection, layer, store):
    arrays = {key: store[key] for key in store.keys() if key != KEY}
    expected = fingerprint(layer.feature_map)
    # Keras asks again, with nothing, for a layer whose first attempt failed.
    found = int(np.asarray(store[KEY])) if KEY in store.keys() else expected
    if found != expected or not arrays:
        name = feature_maps.name_of(layer.feature_map)
        raise ValueError(
            f"Layer '{layer.name}' has the mechanism {name!r}, and the weights were "
            "saved from another one (or one with other arguments), or lack this "
            "layer. Replace attention as it was when the weights were saved."
        )
    type(projection).load_own_variables(projection, arrays)
