"""Finds the models that hold a layer, and discards what they compiled with it.

Keras keeps no reference from a layer to the models around it, and any number of models
may share a layer. They are therefore looked for among the objects of the garbage
collector. This takes up to half a second, so that each change looks once. The collector
does not list what `gc.freeze` has frozen.
"""

import gc

import keras

from keras_rfattn.backend.layers import track_variables_anew
from keras_rfattn.layers import fingerprint

# Compiled functions of Keras models and KerasHub tasks.
COMPILED = ("train", "test", "predict", "generate")
# Key in a model's `vars`, which Keras does not track, of its
# `generation.streaming.Stream`.
STREAM = "_rfattn_stream"


def holders(layers, model=None, among=None):
    """Returns the layers and models of `among`, by default all, that hold `layers`."""
    if among is None:
        # `model` is looked into in any case, as it may be frozen.
        # `isinstance` reads `__class__`, at which some objects emit a warning.
        objects = gc.get_objects()
        among = [x for x in objects if issubclass(type(x), keras.layers.Layer)]
        among += [] if model is None else model._flatten_layers()
    parents = {}
    for layer in among:
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
    vars(layer).pop(STREAM, None)
    track_variables_anew(layer)


def refresh_around(layer):
    """Discards what the models that hold a layer have compiled."""
    for holder in holders([layer]):
        refresh(holder)


fingerprint.WHEN_REFUSED.append(refresh_around)
