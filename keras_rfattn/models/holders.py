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
    """Returns the layers and models in this process that hold any of `layers`."""
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


def with_built_optimizer(layers):
    """Returns those of the layers, and of what holds them, with a built optimizer."""
    models = [*layers, *holders(layers)]
    optimizers = ((x, getattr(x, "optimizer", None)) for x in models)
    return [model for model, x in optimizers if x is not None and x.built]
