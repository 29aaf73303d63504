"""What every function that takes a model asks of it."""

import keras


def check_model(model):
    """Raises `TypeError` unless `model` is a Keras layer, `ValueError` unless built."""
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "`model` must be a Keras model or layer. Received: "
            f"model={model!r} of type {type(model).__name__}."
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built. Received: {title(model)}, which is not. Call "
            "it once on data, or `model.build(...)`, first."
        )


def title(model):
    """How errors and reports name a model."""
    return f"{type(model).__name__} '{model.name}'"
