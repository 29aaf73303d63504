"""Which models of the process hold a layer, and what they must forget when it changes.

Keras keeps no reference from a layer to the models around it, and any number of models
may share it. All layers are therefore remembered, weakly, as they are made. Objects
that only a garbage collector knows would not do: it does not list frozen ones.
"""

import functools
import gc
import weakref

import keras

# Compiled functions of Keras models, KerasHub tasks and `keras_rfattn.generation`.
COMPILED = ("train", "test", "predict", "generate", "stream")

_LAYERS = weakref.WeakValueDictionary()


def _remember_layers():
    """Remembers every layer there is, and every layer that will be made."""
    cls = keras.layers.Layer
    make = cls.__new__

    @functools.wraps(make)
    def __new__(cls, *args, **kwargs):
        layer = make(cls, *args, **kwargs)
        _LAYERS[id(layer)] = layer
        return layer

    cls.__new__ = __new__
    for x in gc.get_objects():
        # Not isinstance: some objects answer a look at `__class__` with a warning.
        if issubclass(type(x), cls):
            _LAYERS[id(x)] = x


_remember_layers()


def holders(layers):
    """The layers and models of the process that hold any of some layers.

    Args:
        layers: Keras layers.

    Returns:
        List of layers, without duplicates: those that hold one directly, and those
        that hold these.
    """
    parents = {}
    for layer in list(_LAYERS.values()):
        # One that is being constructed may have no sublayers yet.
        for child in getattr(layer, "_layers", ()):
            parents.setdefault(id(child), []).append(layer)
    found, todo = {}, list(layers)
    while todo:
        for parent in parents.get(id(todo.pop()), ()):
            if id(parent) not in found:
                found[id(parent)] = parent
                todo.append(parent)
    return list(found.values())


def refresh(layer):
    """Makes a layer forget what it compiled, and PyTorch recount its weights."""
    for name in COMPILED:
        if getattr(layer, f"{name}_function", None) is not None:
            setattr(layer, f"{name}_function", None)
    if keras.backend.backend() == "torch" and layer.built:
        layer._track_variables()


def check_optimizers(layers, feature_maps):
    """Raises `ValueError` if an optimizer would have no slots for new weights.

    Args:
        layers: The layers that are to own the maps.
        feature_maps: Their maps, built.
    """
    pairs = zip(layers, feature_maps, strict=True)
    trainable = [w for x, m in pairs if x.trainable for w in m.trainable_weights]
    if not trainable or not _with_slots(layers):
        return
    # Models that nobody uses any more may be waiting for a collection.
    gc.collect()
    for model in _with_slots(layers):
        raise ValueError(
            f"The optimizer of {type(model).__name__} '{model.name}' is built and has "
            f"no slots for the {len(trainable)} new trainable weights, such as "
            f"{trainable[0].path!r}. Replace attention before training, or compile the "
            "model with a new optimizer first."
        )


def _with_slots(layers):
    """The models around layers whose optimizer is built."""
    optimizers = ((x, getattr(x, "optimizer", None)) for x in holders(layers))
    return [model for model, x in optimizers if x is not None and x.built]
