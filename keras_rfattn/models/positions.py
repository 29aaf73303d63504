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
    """Mixin for models that raises an error for inputs beyond their positions."""

    def __call__(self, *args, **kwargs):
        check_size(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def stateless_call(self, trainable, non_trainable, *args, **kwargs):
        # On JAX, `fit` and `predict` bypass `__call__`.
        check_size(self, args, kwargs)
        return super().stateless_call(trainable, non_trainable, *args, **kwargs)


def check_size(model, args, kwargs):
    """Checks that inputs are no larger than a model's table of positions."""
    if not isinstance(model, keras.Model):
        return
    inputs = args[0] if args else kwargs.get("x", kwargs.get("inputs"))
    if not isinstance(inputs, dict):
        _check_image(model, inputs)
        return
    for name, x in inputs.items():
        if isinstance(name, str) and name.endswith("token_ids"):
            _check_tokens(model, name, x)
        elif name in ("images", "pixel_values"):
            _check_image(model, x)


def _check_tokens(model, name, x):
    shape, limit = _static_shape(x), token_limit(model, name)
    if limit is None or len(shape) != 2 or not _is_above(shape[1], limit):
        return
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


def _check_image(model, x):
    shape = _static_shape(x)
    expected = getattr(_backbone(model), "image_shape", None)
    is_image = isinstance(expected, (tuple, list)) and len(expected) == 3
    if not is_image or len(shape) != 4:
        return
    start = int(getattr(_backbone(model), "data_format", None) == "channels_first")
    size, limit = shape[1 + start : 3 + start], tuple(expected[start : 2 + start])
    if any(_is_above(a, b) for a, b in zip(size, limit, strict=True)):
        raise ValueError(
            f"Images must have height and width {limit}, for which {title(model)} has "
            f"positions (`image_shape`). Received: {tuple(size)}. Resize the images, "
            "or make a copy of the model with more positions: "
            f"`keras_rfattn.extend_positions(model, {tuple(size)})`."
        )


def _static_shape(x):
    """Returns the static shape of a tensor as a tuple, empty if it is unknown."""
    shape = getattr(x, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return ()
    return tuple(shape)


def _is_above(size, limit):
    return isinstance(size, int) and isinstance(limit, int) and size > limit
