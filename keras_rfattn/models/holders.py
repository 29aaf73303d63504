"""Finds the models that hold a layer, and discards what they compiled with it.

Keras keeps no reference from a layer to the models around it, and any number of models
may share a layer. This module therefore keeps a weak reference to every layer from its
creation on. The garbage collector's list of objects would not suffice, because it does
not contain frozen objects (`gc.freeze`).
"""

import functools
import gc
import weakref

import keras

from keras_rfattn.backend.layers import track_variables_anew
from keras_rfattn.models.notes import notes_of

# Compiled functions of Keras models and KerasHub tasks.
COMPILED = ("train", "test", "predict", "generate")

_LAYERS = weakref.WeakValueDictionary()


def _remember_layers():
    """Records every layer that exists, and every layer that will be created."""
    cls = keras.layers.Layer
    make = cls.__new__

    @functools.wraps(make)
    def __new__(cls, *args, **kwargs):
        layer = make(cls, *args, **kwargs)
        _LAYERS[id(layer)] = layer
        return layer

    cls.__new__ = __new__
    for x in gc.get_objects():
        # `isinstance` reads `__class__`, at which some objects emit a warning.
        if issubclass(type(x), cls):
            _LAYERS[id(x)] = x


_remember_layers()


def holders(layers):
    """Returns the layers and models in this process that hold any of `layers`.

    The list holds the direct parents and all their ancestors, once each.
    """
    parents = {}
    for layer in list(_LAYERS.values()):
        # A layer that is being constructed may have no `_layers` yet.
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
    """Discards a layer's compiled functions and PyTorch's list of its variables."""
    for name in COMPILED:
        if getattr(layer, f"{name}_function", None) is not None:
            setattr(layer, f"{name}_function", None)
    notes_of(layer).stream = None
    track_variables_anew(layer)


def check_optimizers(maps):
    """Raises `ValueError` if a built optimizer would lack slots for new weights.

    Args:
        maps: List of `(layer, built feature map)`, for the layers that will own them.
    """
    layers = [layer for layer, _ in maps]
    trainable = [w for x, m in maps if x.trainable for w in m.trainable_weights]
    if not trainable or not with_built_optimizer(layers):
        return
    # Models that nobody uses any more may still await garbage collection. They must
    # not cause an error.
    gc.collect()
    for model in with_built_optimizer(layers):
        raise ValueError(
            f"The optimizer of {type(model).__name__} '{model.name}' is built and has "
            f"no slots for the {len(trainable)} new trainable weights, such as "
            f"{trainable[0].path!r}. Replace attention before training, or compile the "
            "model with a new optimizer first."
        )


def with_built_optimizer(layers):
    """Returns the models around the layers that have a built optimizer."""
    optimizers = ((x, getattr(x, "optimizer", None)) for x in holders(layers))
    return [model for model, x in optimizers if x is not None and x.built]
