"""A fingerprint in saved weights that says which attention mechanism they belong to.

Keras rebuilds many models from their hyperparameters, with softmax attention. The
fingerprint is stored with the arrays of the query projection, so that a softmax layer
finds one array too many and refuses to load. A linear layer compares it with its own;
if they differ, it computes nothing from then on. Linear layers still load softmax
checkpoints, which have neither a fingerprint nor weights of maps, unless a saved config
made the layer linear.
"""

import functools
import zlib

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.layers.checks import projection

KEY = "attention_fingerprint"
FORMAT = 4
# Functions of a layer that refuses to compute; compiled functions would not ask it.
WHEN_REFUSED = []
# Entries of the config of a plain dtype policy.
POLICY = {"class_name": "", "config": {"name": ""}, "module": "", "registered_name": ""}
# Config entries of a map that do not change the function of its weights.
IGNORED = ("name", "trainable", "dtype", "seed", "projection", "module")


def fingerprint(layer):
    """Returns `[format, checksum]` for the function that a layer computes."""
    return np.array([FORMAT, checksum(layer)])


def checksum(layer):
    """Returns the checksum of a layer's `fingerprint`, a non-negative integer."""
    options, feature_map = layer.options, layer.feature_map
    meaning = [options.window, options.sliding]
    if options.temperature is not None:
        meaning.append(float(options.temperature))
    if options.softmax_heads:
        meaning.append(options.softmax_heads)
    if options.sinks:
        meaning.append(("sinks", options.sinks))
    essence = type(feature_map).__name__, _essence(feature_map.get_config())
    described = essence, meaning, _projections(feature_maps.serialize(feature_map))
    return zlib.crc32(repr(described).encode()) & 0x7FFFFFFF


def _essence(config):
    """Returns what decides a map's function besides its weights, seeds and names."""
    if isinstance(config, dict):
        kept = sorted(key for key in config if key not in IGNORED)
        return [(key, _essence(config[key])) for key in kept]
    if isinstance(config, (list, tuple)):
        return [_essence(item) for item in config]
    # A saved file turns NumPy scalars into Python numbers, which must compare equal.
    return config.item() if isinstance(config, np.generic) else config


def _projections(config):
    """Returns how random vectors are drawn in all parts of a config, without seeds."""
    if isinstance(config, dict):
        found, projection = [], config.get("projection")
        if isinstance(projection, dict):
            arguments = sorted(
                (k, repr(v)) for k, v in projection["config"].items() if k != "seed"
            )
            found = [projection["class_name"], arguments]
        # The config of a quantized layer's policy has more entries, which must not
        # change the fingerprint.
        config = config | ({"dtype": POLICY} if "dtype" in config else {})
        return found + [
            _projections(config[k]) for k in sorted(config) if k != "projection"
        ]
    if isinstance(config, (list, tuple)):
        return [_projections(item) for item in config]
    return []


def agrees(layer, found):
    """Returns whether an array `[format, checksum]` belongs to a layer's function."""
    return np.asarray(found).tolist() == [FORMAT, checksum(layer)]


def mark(layer):
    """Makes a built linear attention layer save and check its fingerprint."""
    for part in _maps(layer):
        part.in_file = True
    query = projection(layer, "query")
    query.save_own_variables = functools.partial(_save, query, layer)
    query.load_own_variables = functools.partial(_load, query, layer)


def _maps(layer):
    """Returns a layer's feature map and the maps inside it."""
    parts = layer.feature_map._flatten_layers()
    return [x for x in parts if isinstance(x, feature_maps.FeatureMap)]


def unmark(layer):
    """Undoes `mark`."""
    for name in ("save_own_variables", "load_own_variables"):
        vars(projection(layer, "query")).pop(name, None)


def _save(query, layer, store):
    type(query).save_own_variables(query, store)
    store[KEY] = fingerprint(layer).astype("int32")


def _load(query, layer, store):
    arrays = {key: store[key] for key in store.keys() if key != KEY}
    if not arrays:
        # Keras tries again with an empty store if it has failed, or has no such layer.
        raise ValueError(layer.refusal or f"The weights lack layer '{layer.name}'.")
    reason = _mismatch(layer, store)
    if reason is not None:
        if layer.refusal is None:
            for forget in WHEN_REFUSED:
                forget(layer)
        # With `skip_mismatch=True`, Keras ignores the error and loads other weights.
        name = feature_maps.name_of(layer.feature_map)
        layer.refusal = f"Layer '{layer.name}' has the mechanism {name!r}, but {reason}"
        raise ValueError(layer.refusal)
    type(query).load_own_variables(query, arrays)
    layer.is_from_config, layer.refusal = False, None


def _mismatch(layer, store):
    """Returns why the weights in a file do not belong to a layer, or `None`."""
    is_marked = KEY in store.keys()
    if is_marked and not agrees(layer, store[KEY]):
        return (
            "the weights were saved with another mechanism, other arguments or another "
            "window. Replace attention as it was when the weights were saved."
        )
    # Keras loads the sublayer `feature_map` first.
    has_map = all(x.in_file == is_marked for x in _maps(layer) if x.has_own_weights)
    if not has_map or (not is_marked and layer.is_from_config):
        return (
            f"the file lacks its {KEY!r} or the weights of its map: it was not saved "
            "with the config, is damaged, or was put together from other files. To use "
            "softmax weights, load them into the softmax model, then replace attention."
        )
    return None
