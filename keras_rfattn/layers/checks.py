"""Checks of models, and finds projections, whose names differ between classes.

Every function that takes a model uses `check_model`.
"""

import keras


def check_model(model):
    """Raises `TypeError` unless `model` is a Keras layer, `ValueError` unless built."""
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "`model` must be a Keras model or layer. Received: "
            f"model={model!r:.200} of type {type(model).__name__}.{_way_out(model)}"
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built. Received: {title(model)}, which is not built. "
            "Call it once on data, or call `model.build(...)`, first."
        )


def _way_out(found):
    """Returns advice on what to pass instead of a wrong object, if there is any."""
    if isinstance(found, str):
        return (
            " Load the model of a KerasHub preset first: "
            f"`keras_hub.models.Backbone.from_preset({found!r})`."
        )
    if isinstance(found, type) and issubclass(found, keras.layers.Layer):
        return f" Make a model of the class first: `{found.__name__}(...)`."
    return ""


def title(model):
    """Returns the name of a model for errors and reports."""
    return f"{type(model).__name__} '{model.name}'"


# Names under which attention classes store their projections. A fused projection is
# listed for each of query, key and value.
PROJECTIONS = {
    "query": (
        "_query_dense", "query_dense", "q_proj", "q_dense", "query_proj", "_qkv_dense"
    ),
    "key": ("_key_dense", "key_dense", "k_proj", "k_dense", "key_proj", "_qkv_dense"),
    "value": (
        "_value_dense", "value_dense", "v_proj", "v_dense", "value_proj", "_qkv_dense"
    ),
    "output": ("_output_dense", "output_dense", "o_proj", "o_dense", "out_proj"),
}  # fmt: skip


def projection(layer, side):
    """Returns a projection of an attention layer; `side` is a key of `PROJECTIONS`."""
    return next(getattr(layer, x) for x in PROJECTIONS[side] if hasattr(layer, x))
