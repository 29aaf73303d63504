"""Changing one attention layer: softmax to linear, in place, and back.

The layer object changes class and gains a feature map; its projections, their names,
the graph and the parents stay as they are. Lies below both `saving` and `replace`.
"""

import contextlib

import keras

import keras_rfattn.models.adapters.known as known
from keras_rfattn import feature_maps
from keras_rfattn import layers
from keras_rfattn.layers.fingerprint import unmark
from keras_rfattn.layers.linear_attention import STATE
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.models.strategy import strategy_scope
from keras_rfattn.ops.options import Options

# Foreign class -> linear class. Libraries add theirs when they are imported.
LINEAR_CLASSES = {
    keras.layers.MultiHeadAttention: layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention: layers.GroupedQueryAttention,
}


def original_class(layer):
    """The class a layer had before surgery: its own if it had none."""
    return getattr(type(layer), "original_class", type(layer))


def linear_class(cls):
    """The linear class for an attention class, or `None` if there is none.

    A subclass of a known class qualifies if it leaves the computation alone.
    """
    for base, linear in LINEAR_CLASSES.items():
        if cls is base:
            return linear
    for base in LINEAR_CLASSES:
        names = ("call", "_compute_attention", "_compute_attention_mask")
        if issubclass(cls, base) and all(
            getattr(cls, n, None) is getattr(base, n, None) for n in names
        ):
            LINEAR_CLASSES[cls] = make_linear_class(cls, parent=LINEAR_CLASSES[base])
            return LINEAR_CLASSES[cls]
    return None


def make_linear_class(cls, mixin=LinearAttention, parent=None):
    """A class that is `cls` with linear attention, for layers changed in place.

    Args:
        cls: The softmax class.
        mixin: `LinearAttention`, or a subclass.
        parent: The linear class of its base, if that has one; its mixin is taken then.

    Returns:
        A subclass of `cls`.
    """
    mixin = getattr(parent, "mixin", mixin)
    members = {
        "mixin": mixin,
        "__module__": __name__,
        "__doc__": cls.__doc__,
        "__reduce__": _reduce,
        "original_class": cls,
        "query_normalizations": known.QUERY_NORMALIZATIONS,
    }
    if parent is not None and "_kv_shape" in vars(parent):
        members["_kv_shape"] = parent._kv_shape
    # Known classes have a registered drop-in; layers of others are rebuilt by the
    # container that holds them, so that their config need not name this class.
    return type(cls.__name__, (mixin, cls), members)


def _scope(layer):
    """The scopes of a built layer's weights: of its strategy, and of their names."""
    stack = contextlib.ExitStack()
    stack.enter_context(strategy_scope(layer))
    for name in (layer.path or layer.name).split("/"):
        stack.enter_context(keras.name_scope(name))
    return stack


def build_map(layer, feature_map):
    """Builds a map for a softmax layer, which stays as it is."""
    linear = linear_class(type(layer))
    kv_heads, head_dim = linear._kv_shape(layer)
    feature_map.name = "feature_map"
    feature_map.dtype_policy = layer.dtype_policy
    with _scope(layer):
        feature_map.build((None, None, kv_heads, head_dim))


def make_linear(layer, feature_map, options):
    """Makes a softmax layer linear; the map is built."""
    layer.__class__ = linear_class(type(layer))
    layer._tracker.unlock()
    try:
        layer._set_mechanism(feature_map, options)
        with _scope(layer):
            layer._build_mechanism()
    finally:
        layer._lock_state()


def make_softmax(layer):
    """Gives a linear layer its class back, and takes its map."""
    unmark(layer)
    layer._tracker.untrack(layer.feature_map)
    for name in ("feature_map", *STATE):
        if name == "feature_map" or name in vars(layer):
            delattr(layer, name)
    layer.__class__ = type(layer).original_class


def _reduce(layer):
    """How a layer of a class that no import finds is pickled and copied."""
    config = layer.get_config()
    feature_map, _ = config.pop("feature_map"), config.pop("trained", ())
    options = Options.take(config)
    arguments = _plain((config, layer.get_build_config(), feature_map))
    return unpickle, (original_class(layer), *arguments, options, layer.get_weights())


def _plain(x):
    """Without the dicts and lists by which Keras tracks layers: they do not pickle."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return (tuple if isinstance(x, tuple) else list)(_plain(item) for item in x)
    return x


def unpickle(cls, config, build_config, feature_map, options, weights):
    """The layer that `_reduce` took apart."""
    layer = cls.from_config(config)
    layer.build_from_config(build_config)
    feature_map = feature_maps.get(feature_map)
    build_map(layer, feature_map)
    make_linear(layer, feature_map, options)
    layer.set_weights(weights)
    return layer
