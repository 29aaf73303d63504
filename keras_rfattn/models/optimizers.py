"""Refuses to change which weights train under an optimizer that is built.

An optimizer holds slots, such as moments, for the weights that its model trained when
it was built. If the model trains other weights later, Keras fails in the middle of
`fit`, and on JAX the model then loses its weights.
"""

import contextlib
import gc

from keras_rfattn.feature_maps import base
from keras_rfattn.models.holders import holders


@contextlib.contextmanager
def following(layers, training=None, model=None):
    """Yields the holders of `layers`; refuses a built optimizer of `training` ones."""
    # `training` are those of the layers whose trained weights change, by default all.
    training = layers if training is None else training
    around = holders(layers, model)
    if _with_built_optimizer(training, around):
        # Models that nobody uses any more may still await garbage collection. They
        # must not cause an error.
        del around
        gc.collect()
        around = holders(layers, model)
    for holder in _with_built_optimizer(training, around):
        raise ValueError(
            "A model must not have a built optimizer when weights that train come or "
            f"go. Received: {type(holder).__name__} '{holder.name}', whose "
            f"{type(holder.optimizer).__name__} is built. Compile the model with a new "
            "optimizer first: `model.compile(...)`, then this change, then `fit`."
        )
    yield around


def _with_built_optimizer(layers, around):
    """Returns those of the layers, and of what holds them, with a built optimizer."""
    models = [*layers, *holders(layers, among=around)]
    optimizers = ((x, getattr(x, "optimizer", None)) for x in models)
    return [model for model, x in optimizers if x is not None and x.built]


def _check_freezing(feature_map):
    with following([feature_map]):
        pass


base.BEFORE_FREEZING.append(_check_freezing)
