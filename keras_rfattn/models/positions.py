"""Refuses inputs that are larger than a model's table of learned positions."""

import keras

from keras_rfattn.layers.checks import title
from keras_rfattn.models.notes import notes_of

# KerasHub's layer class whose table has one row for each position.
TABLE = "PositionEmbedding"


def token_limit(model, name="token_ids"):
    """Returns the number of tokens for which a model has learned positions."""
    # The result can be kept, because no table ever changes its size.
    known = notes_of(model).token_limits
    if name not in known:
        known[name] = _token_limit(model, name)
    return known[name]


def _token_limit(model, name):
    lengths = {x.sequence_length for x in tables_of(model)}
    declared = getattr(_backbone(model), _attribute(model, name), None)
    if declared is None and len(lengths) == 1:
        return lengths.pop()
    return declared if declared in lengths else None


def tables_of(model):
    """Returns the layers of a model that hold learned positions."""
    layers = [x for x in model._flatten_layers() if type(x).__name__ == TABLE]
    return [x for x in layers if hasattr(x, "sequence_length")]


def _backbone(model):
    return getattr(model, "backbone", None) or model


def _attribute(model, name):
    """Returns the name of the attribute that holds a backbone's number of positions."""
    side = name.removesuffix("token_ids")
    special = f"max_{side}sequence_length"
    is_special = hasattr(_backbone(model), special)
    return special if is_special else "max_sequence_length"


class Sized:
    """Mixin for models that raises an error for tokens beyond their positions."""

    def __call__(self, *args, **kwargs):
        check_size(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def stateless_call(self, trainable, non_trainable, *args, **kwargs):
        # On JAX, `fit` and `predict` bypass `__call__`.
        check_size(self, args, kwargs)
        return super().stateless_call(trainable, non_trainable, *args, **kwargs)


def check_size(model, args, kwargs):
    """Raises `ValueError` for more tokens than a model's table of positions has."""
    inputs = args[0] if args else kwargs.get("x", kwargs.get("inputs"))
    if not isinstance(model, keras.Model) or not isinstance(inputs, dict):
        return
    for name, x in inputs.items():
        if not isinstance(name, str) or not name.endswith("token_ids"):
            continue
        limit, shape = token_limit(model, name), tuple(getattr(x, "shape", ()))
        is_known = len(shape) == 2 and isinstance(shape[1], int)
        if limit is None or not is_known or shape[1] <= limit:
            continue
        attribute = _attribute(model, name)
        way_out = "Cut the texts (`sequence_length` of the preprocessor)."
        if attribute == "max_sequence_length":
            way_out = (
                "Cut the texts (`sequence_length` of the preprocessor, `max_length` of "
                "`generate`), or make a copy of the model with more positions: "
                f"`keras_rfattn.extend_positions(model, {shape[1]})`."
            )
        raise ValueError(
            f"`{name}` must have at most {limit} tokens, the number of positions of "
            f"{title(model)} (`{attribute}`). Received: {shape[1]} tokens. {way_out}"
        )
