"""Refuses inputs that are larger than a model's table of learned positions."""

import keras

from keras_rfattn.layers.checks import title

# KerasHub's layer class whose table has one row for each position.
TABLE = "PositionEmbedding"


def token_limit(model, name="token_ids"):
    """Returns the number of tokens for which a model has learned positions."""
    # The result is kept, because no table ever changes its size.
    limits = vars(model).setdefault("_rfattn_token_limits", {})
    if name not in limits:
        tables = [x for x in model._flatten_layers() if type(x).__name__ == TABLE]
        lengths = {getattr(x, "sequence_length", None) for x in tables}
        _, declared = _declared(model, name)
        if declared is None and len(lengths) == 1:
            declared = min(lengths)
        limits[name] = declared if declared in lengths else None
    return limits[name]


def _declared(model, name):
    """Returns the attribute with a backbone's number of positions, and its value."""
    backbone = getattr(model, "backbone", None) or model
    attribute = f"max_{name.removesuffix('token_ids')}sequence_length"
    if not hasattr(backbone, attribute):
        attribute = "max_sequence_length"
    return attribute, getattr(backbone, attribute, None)


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
        attribute, _ = _declared(model, name)
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
