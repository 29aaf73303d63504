"""Finds the models that hold a layer, before and after a change of the layer.

What they compiled with it is discarded after the change, which is refused if one of
their optimizers has trained and would meet other weights than those that it has slots
for, such as moments: Keras would fail in the middle of `fit`, and on JAX the model would
lose its weights. An optimizer that was only built, as `evaluate` does, begins anew.

Keras keeps no reference from a layer to the models around it, and any number of models
may share a layer. They are therefore looked for among the objects of the garbage
collector. This takes up to half a second, so that each change looks once. The collector
does not list what `gc.freeze` has frozen.
"""

import contextlib
import gc

import keras

from keras_rfattn.backend.layers import track_variables_anew
from keras_rfattn.feature_maps import base
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


@contextlib.contextmanager
def following(layers, training=None, model=None):
    """Yields the holders of `layers`; refuses if an optimizer of `training` has trained."""
    # `training` are those of the layers whose trained weights change, by default all.
    training = layers if training is None else training
    around = holders(layers, model)
    if any(map(_has_trained, _with_built_optimizer(training, around))):
        # Models that nobody uses any more may still await garbage collection. They
        # must not cause an error.
        del around
        gc.collect()
        around = holders(layers, model)
    built = _with_built_optimizer(training, around)
    for holder in filter(_has_trained, built):
        raise ValueError(
            "A model must not have an optimizer that has trained when weights that "
            f"train come or go. Received: {type(holder).__name__} '{holder.name}', "
            f"whose {type(holder.optimizer).__name__} has trained. Compile the model "
            "with a new optimizer first: `model.compile(...)`, then this change, then "
            "`fit`."
        )
    yield around
    for holder in built:
        optimizer = holder.optimizer
        holder.optimizer = type(optimizer).from_config(optimizer.get_config())


def _with_built_optimizer(layers, around):
    """Returns those of the layers, and of what holds them, with a built optimizer."""
    models = [*layers, *holders(layers, among=around)]
    optimizers = ((x, getattr(x, "optimizer", None)) for x in models)
    return [model for model, x in optimizers if x is not None and x.built]


def _has_trained(model):
    return int(model.optimizer.iterations) > 0


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


def _check_freezing(feature_map):
    with following([feature_map]):
        pass


fingerprint.WHEN_REFUSED.append(refresh_around)
base.BEFORE_FREEZING.append(_check_freezing)
