"""Changes one attention layer from softmax to linear in place, and back.

The layer object changes its class and gains a feature map. Its projections, their
names, the model graph and the parent layers stay as they are.
"""

import contextlib
import functools

import keras

from keras_rfattn import feature_maps, layers
from keras_rfattn.backend.layers import strategies
from keras_rfattn.layers.fingerprint import unmark
from keras_rfattn.layers.linear_attention import STATE, LinearAttention
from keras_rfattn.ops.options import Options

# Softmax class -> linear class. An adapter adds the classes of its library when that
# library is imported.
LINEAR_CLASSES = {
    keras.layers.MultiHeadAttention: layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention: layers.GroupedQueryAttention,
}


def original_class(layer):
    """Returns the class that a layer or model had before replacement."""
    return getattr(type(layer), "original_class", type(layer))


def linear_class(cls):
    """Returns the linear class for an attention class, or `None` if there is none."""
    if cls in LINEAR_CLASSES:
        return LINEAR_CLASSES[cls]
    names = ("call", "_compute_attention", "_compute_attention_mask")
    for base, linear in LINEAR_CLASSES.items():
        if issubclass(cls, base) and all(
            getattr(cls, n, None) is getattr(base, n, None) for n in names
        ):
            LINEAR_CLASSES[cls] = make_linear_class(cls, parent=linear)
            return LINEAR_CLASSES[cls]
    return None


def make_linear_class(cls, mixin=LinearAttention, parent=None):
    """Creates a subclass of `cls` with linear attention, for changes in place."""
    mixin = getattr(parent, "mixin", mixin)
    members = {
        "mixin": mixin,
        "__module__": __name__,
        "__doc__": cls.__doc__,
        "__reduce__": reduce,
        "from_config": classmethod(_from_config),
        "original_class": cls,
    }
    if parent is not None and "_kv_shape" in vars(parent):
        members["_kv_shape"] = parent._kv_shape
    made = type(cls.__name__, (mixin, cls), members)
    name = cls.__name__ if parent is None else f"{cls.__module__}.{cls.__name__}"
    return keras.saving.register_keras_serializable("keras_rfattn", name)(made)


def strategy_scope(layer):
    """Returns the scope of TensorFlow's strategy in which a layer was built."""
    if not layer.weights:
        return contextlib.nullcontext()
    own, current = strategies(layer.weights[0])
    if own is current:
        return contextlib.nullcontext()
    if current is None:
        return own.scope()
    made = "outside of any strategy's scope"
    made = made if own is None else f"in the scope of {type(own).__name__}"
    raise ValueError(
        "Weights must be added to a model in the scope of the strategy in which it "
        f"was made. Received: the scope of {type(current).__name__} for "
        f"'{layer.name}', which was made {made}. Leave the scope, or make the model "
        "in it."
    )


def _scope(layer):
    """Returns the strategy scope and the name scopes of a built layer's weights."""
    stack = contextlib.ExitStack()
    stack.enter_context(strategy_scope(layer))
    for name in (layer.path or layer.name).split("/"):
        stack.enter_context(keras.name_scope(name))
    return stack


def build_map(layer, feature_map):
    """Builds a feature map for a softmax layer, without changing the layer."""
    linear = linear_class(type(layer))
    kv_heads, head_dim = linear._kv_shape(layer)
    feature_map.name = "feature_map"
    feature_map.dtype_policy = layer.dtype_policy
    with _scope(layer):
        feature_map.build((None, None, kv_heads, head_dim))


def make_linear(layer, feature_map, options):
    """Makes a softmax layer linear in place; `build_map` has built its map."""
    layer.__class__ = linear_class(type(layer))
    layer._tracker.unlock()
    try:
        layer._set_mechanism(feature_map, options)
        with _scope(layer):
            layer._build_mechanism()
    finally:
        layer._lock_state()


def make_softmax(layer):
    """Restores the softmax class of a linear layer, and removes its feature map."""
    unmark(layer)
    layer._tracker.untrack(layer.feature_map)
    for name in ("feature_map", *STATE):
        if name == "feature_map" or name in vars(layer):
            delattr(layer, name)
    layer.__class__ = type(layer).original_class


def _from_config(cls, config):
    """Serves as `from_config`: the layer becomes linear once it has been built."""
    feature_map = feature_maps.get(config.pop("feature_map"))
    options, self_attention = Options.take(config), config.pop("self_attention", None)
    layer = cls.original_class.from_config(config)

    def change():
        build_map(layer, feature_map)
        make_linear(layer, feature_map, options)
        layer.is_from_config, layer.self_attention = True, self_attention

    when_built(layer, change)
    return layer


def when_built(layer, action):
    """Runs `action` once, right after `layer` has been built."""
    build = layer.build

    @functools.wraps(build)
    def build_and_act(*args, **kwargs):
        layer.build = build
        build(*args, **kwargs)
        action()

    layer.build = build_and_act


def reduce(layer):
    """Serves as `__reduce__` for objects whose class cannot be imported by name."""
    _, arguments = keras.layers.Layer.__reduce__(layer)
    return _unpickle, (*arguments, layer.original_class)


def _unpickle(bytesio, original):
    # Keras finds the class of a layer once it is created, and that of a KerasHub model
    # once its library is imported, as the original class has been.
    linear_class(original)
    return keras.layers.Layer._unpickle_model(bytesio)
