"""A mark in saved weights that says which mechanism they belong to.

Keras rebuilds many models from hyper-parameters, as softmax, and its loader skips
saved weights that the rebuilt layer has no place for if it meets the layer by a
second path. The mark is therefore stored beside the query projection's own arrays:
a softmax layer finds one array too many there and refuses, a replaced layer
compares. A softmax checkpoint, without a mark and without arrays of the feature map,
loads as it always did; not where the config that came with it says linear.
"""

import functools
import zlib

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.stateless import essence
from keras_rfattn.layers.checks import projection

KEY = "attention_fingerprint"
FORMAT = 2
OF_ANOTHER = (
    "the weights were saved from another one, or with other arguments or another "
    "window. Replace attention as it was when the weights were saved"
)
# Options that change what is computed.
MEANING = ("window", "sliding")
# What the config of a plain dtype policy is made of.
POLICY = {"class_name": "", "config": {"name": ""}, "module": "", "registered_name": ""}
# A map inside a map is known by its file too. Where files have moved since the first
# marks were written, what they were called then.
FORMER_MODULES = {
    f"keras_rfattn.feature_maps.{now}": f"keras_rfattn.feature_maps.{then}"
    for now, then in {
        "favor": "trigonometric",
        "favorplus": "positive",
        "favorpp": "generalized_exponential",
        "monomials": "discrete",
    }.items()
}


def fingerprint(layer):
    """`[format, checksum]` of what a layer computes, whatever its seed and names."""
    options = [getattr(layer.options, name) for name in MEANING]
    if layer.options.temperature is not None:
        options.append(float(layer.options.temperature))
    if layer.options.softmax_heads:
        options.append(layer.options.softmax_heads)
    config = feature_maps.serialize(layer.feature_map)
    of_map = _former(essence(layer.feature_map))
    return np.array([FORMAT, _checksum((of_map, options, _projections(config)))])


def _former(x):
    """An `essence` with the names that files had when marks were first written."""
    if isinstance(x, tuple) and x[0] == "module":
        return x[0], FORMER_MODULES.get(x[1], x[1])
    if isinstance(x, (list, tuple)):
        return type(x)(_former(item) for item in x)
    return x


def _checksum(x):
    return zlib.crc32(repr(x).encode()) & 0x7FFFFFFF


def _projections(config):
    """Where random vectors come from, whatever their seeds, wherever in a config."""
    if isinstance(config, dict):
        own = config.get("projection")
        own = (
            []
            if not isinstance(own, dict)
            else [
                own["class_name"],
                sorted((k, repr(v)) for k, v in own["config"].items() if k != "seed"),
            ]
        )
        # Policies of quantized layers have more to their configs than those of others.
        config = config | ({"dtype": POLICY} if "dtype" in config else {})
        return own + [
            _projections(config[k]) for k in sorted(config) if k != "projection"
        ]
    if isinstance(config, (list, tuple)):
        return [_projections(item) for item in config]
    return []


def _is_mark_of(layer, found):
    if found.shape == ():
        # Format 1 covered the map alone.
        return int(found) == _checksum(_former(essence(layer.feature_map)))
    return np.array_equal(found, fingerprint(layer))


class Marks(dict):
    """The mark that a file holds of one layer, without the layer's arrays.

    `models.loading` shows it to all layers before the first array is loaded.

    Attributes:
        refusal: What the layer says against it, or `None`.
        is_known: Whether the layer is linear, and has looked at it.
    """

    refusal, is_known = None, False


class Presence:
    """Whether a file holds a mechanism: its mark and all weights of its map, or none.

    Keras loads parts in an order of its own, so that the later ones are compared with
    the first.
    """

    def __init__(self):
        self.seen = {}

    def compare(self, part, found):
        """Why a file is refused that holds one part and not another, or `None`.

        Args:
            part: Hashable; what the file may hold.
            found: Whether it does.
        """
        # Keras asks again for parts that failed, but in every file for the first.
        if part == next(iter(self.seen), part):
            self.seen.clear()
        self.seen[part] = found
        if len(set(self.seen.values())) > 1:
            return (
                f"the file holds the weights of a feature map without the {KEY!r} of "
                "its attention layer, or the other way round: it is damaged, or put "
                "together from others. Save the model again"
            )
        return None


def mark(layer):
    """Makes a built linear attention layer save and check its fingerprint."""
    presence = Presence()
    for part in layer.feature_map._flatten_layers():
        part.presence = presence
    query = projection(layer, "query")
    query.save_own_variables = functools.partial(_save, query, layer)
    query.load_own_variables = functools.partial(_load, query, layer)


def unmark(layer):
    """Undoes `mark`."""
    for name in ("save_own_variables", "load_own_variables"):
        vars(projection(layer, "query")).pop(name, None)


def _save(query, layer, store):
    type(query).save_own_variables(query, store)
    store[KEY] = fingerprint(layer).astype("int32")


def _look(layer, marks):
    """Compares a mark before anything is loaded."""
    if KEY not in marks:
        raise KeyError(f"The file has no {KEY!r} of layer '{layer.name}' here.")
    marks.is_known = True
    if not _is_mark_of(layer, marks[KEY]):
        marks.refusal = _refused(layer, OF_ANOTHER)


def _refused(layer, refusal):
    name = feature_maps.name_of(layer.feature_map)
    return f"Layer '{layer.name}' has the mechanism {name!r}, and {refusal}."


def _load(query, layer, store):
    if isinstance(store, Marks):
        return _look(layer, store)
    arrays = {key: store[key] for key in store.keys() if key != KEY}
    is_marked, refusal = KEY in store.keys(), None
    if not arrays:
        # Keras asks again, with nothing, for a layer whose first attempt failed.
        refusal = layer.refusal or "the weights lack this layer"
    elif is_marked and not _is_mark_of(layer, np.asarray(store[KEY])):
        refusal = OF_ANOTHER
    elif not is_marked and layer.is_from_config:
        refusal = (
            f"the weights beside its config have no {KEY!r}: they were not saved with "
            "it, or are damaged. To load softmax weights, load them into the softmax "
            "model and replace its attention"
        )
    else:
        refusal = layer.feature_map.presence.compare(KEY, is_marked)
    layer.refusal = refusal
    if refusal is not None:
        raise ValueError(_refused(layer, refusal))
    type(query).load_own_variables(query, arrays)
    layer.is_from_config = False
