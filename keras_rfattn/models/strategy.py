"""Enters the TensorFlow distribution strategy in which a model was created."""

import contextlib

from keras_rfattn.backend.layers import strategies


def strategy_scope(layer):
    """Returns the scope of the strategy in which a layer's weights were created.

    New weights of the layer must be created inside this scope.

    Args:
        layer: A built layer or model.

    Returns:
        A context manager. It does nothing if there is no strategy, or if its scope is
        already active.

    Raises:
        ValueError: If the scope of a different strategy is active.
    """
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
