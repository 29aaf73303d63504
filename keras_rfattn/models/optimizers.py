"""Refuses to change which weights train under an optimizer that is built.

An optimizer holds slots, such as moments, for the weights that its model trained when
it was built. If the model trains other weights later, Keras fails in the middle of
`fit`, and on JAX the model then loses its weights.
"""

import contextlib
import gc

from keras_rfattn.feature_maps import base
from keras_rfattn.models.holders import with_built_optimizer


@contextlib.contextmanager
def following(layers):
    """Context manager that changes which weights of layers train, if that is possible.

    Raises `ValueError` before anything changes if an optimizer is built for them.
    """
    check_optimizers(layers)
    yield


def check_optimizers(layers):
    """Raises `ValueError` if what holds the layers has a built optimizer."""
    if with_built_optimizer(layers):
        # Models that nobody uses any more may still await garbage collection. They
        # must not cause an error.
        gc.collect()
    for model in with_built_optimizer(layers):
        raise ValueError(
            "A model must not have a built optimizer when weights that train come or "
            f"go. Received: {type(model).__name__} '{model.name}', whose "
            f"{type(model.optimizer).__name__} is built. Compile the model with a new "
            "optimizer first: `model.compile(...)`, then this change, then `fit`."
        )


base.BEFORE_FREEZING.append(lambda feature_map: check_optimizers([feature_map]))
