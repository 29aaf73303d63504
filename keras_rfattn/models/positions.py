"""Learned position tables: refuses inputs that are larger, and extends a table."""

import copy
import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import is_integer
from keras_rfattn.layers.checks import check_model, title

# KerasHub's layer class whose table has one row for each position.
TABLE = "PositionEmbedding"
# Attributes of a preprocessor that hold the number of tokens of its outputs.
LENGTHS = "sequence_length", "encoder_sequence_length", "decoder_sequence_length"


def extend_positions(
    model: keras.Model, max_length: int | tuple[int, int]
) -> keras.Model:
    """Copies a model with a larger table of learned positions, for longer inputs.

    The larger table repeats the old one, so that every position has a trained
    embedding. All else is copied: weights, `trainable` flags, tokenizer and linear
    attention. The preprocessor of the copy gives inputs of the new length
    (`longer.preprocessor.sequence_length = 512` cuts texts earlier).

    Args:
        model: A KerasHub backbone with learned absolute positions, or a task around
            one. This model does not change.
        max_length: The new number of positions for text, at least the old one; the new
            `(height, width)` in pixels for images.

    Returns:
        A new model of the same class, compiled only if its constructor compiles it.

    Raises:
        ValueError: If the model has no learned positions or cannot be rebuilt from its
            config, or if `max_length` is invalid.
    """
    check_model(model)
    backbone = getattr(model, "backbone", None) or model
    config = backbone.get_config()
    old, new = _resize(config, max_length, model)
    extended = type(backbone).from_config(config)
    if backbone is not model:
        config = {**model.get_config(), "backbone": extended}
        if "preprocessor" in config:
            config["preprocessor"] = _resized(model.preprocessor, new)
        extended = type(model).from_config(config)
    _copy_weights(model, extended, old, new)
    _copy_trainable(model, extended)
    return extended


def _not_extended(model, reason):
    return ValueError(
        "`model` must be a KerasHub backbone with learned positions, or a task around "
        f"one. Received: {title(model)} ({reason}). Use "
        "`keras_rfattn.extend_positions(backbone, ...)` of each backbone or encoder "
        "with a position table, and build the model around the result."
    )


def _resize(config, max_length, model):
    """Writes the new size into a backbone's config; returns old and new, as tuples."""
    is_text = "max_sequence_length" in config
    if not is_text and "image_shape" not in config:
        reason = "its config has no `max_sequence_length` or `image_shape`"
        raise _not_extended(model, reason)
    if is_text:
        old, size = (config["max_sequence_length"],), (max_length,)
        wanted = f"an integer of at least {old[0]}, the number of positions of"
    else:
        shape = list(config["image_shape"])
        data_format = config.get("data_format") or keras.config.image_data_format()
        start = int(data_format == "channels_first")
        old, size = tuple(shape[start : start + 2]), max_length
        wanted = f"the new (height, width), at least {old}, the image size of"
    if None in old:
        raise _not_extended(model, "it takes inputs of any size")
    has_length = isinstance(size, (tuple, list)) and len(size) == len(old)
    if not has_length or any(
        not is_integer(n) or n < o for n, o in zip(size, old, strict=True)
    ):
        raise ValueError(
            f"`max_length` must be {wanted} {title(model)}. Received: "
            f"max_length={max_length!r}."
        )
    new = tuple(map(int, size))
    if is_text:
        config["max_sequence_length"] = new[0]
    else:
        config["image_shape"] = [*shape[:start], *new, *shape[start + 2 :]]
    return old, new


def _resized(preprocessor, new):
    """Returns a copy of a preprocessor that gives inputs of the new size."""
    # Keras copies a layer as it saves one, and so with a tokenizer's vocabulary.
    preprocessor = copy.deepcopy(preprocessor)
    if len(new) == 2 and getattr(preprocessor, "image_size", None) is not None:
        preprocessor.image_size = new
    if len(new) == 1:
        for name in LENGTHS:
            length = getattr(preprocessor, name, None)
            if length is not None:
                setattr(preprocessor, name, max(length, *new))
    return preprocessor


def _copy_weights(source, target, old, new):
    """Copies all weights, and repeats the positions in those that hold them."""
    counts = len(source.variables), len(target.variables)
    if counts[0] != counts[1]:
        reason = (
            f"its copy has {counts[1]} weights instead of {counts[0]}, which happens "
            "if LoRA or quantization was added after the model was built"
        )
        raise _not_extended(source, reason)
    pairs = list(zip(source.variables, target.variables, strict=True))
    if old != new and all(tuple(a.shape) == tuple(b.shape) for a, b in pairs):
        raise _not_extended(source, "no weight of it depends on the length")
    for a, b in pairs:
        # The NumPy copy keeps the models apart: on JAX they would otherwise share one
        # buffer, which `fit` donates.
        weight = ops.convert_to_numpy(a)
        if tuple(a.shape) == tuple(b.shape):
            b.assign(weight)
        elif "float" in keras.backend.standardize_dtype(a.dtype):
            b.assign(_grown(weight.astype("float32"), b, old, new))


def _grown(table, variable, old, new):
    """Repeats the positions in a table; rows before them, as class tokens, stay."""
    shape, width = tuple(variable.shape), table.shape[-1]
    rows, count = table.reshape(-1, width), math.prod(shape) // width
    # The patch size (1 for text) leaves equally many rows before both grids.
    for patch in range(1, min(old) + 1):
        before, after = ([n // patch for n in size] for size in (old, new))
        extra = len(rows) - math.prod(before)
        if 0 <= extra <= 8 and count == extra + math.prod(after) and before != after:
            break
    else:
        raise ValueError(
            "`model` must have position tables for tokens or square patches, and no "
            f"other weights that depend on its length. Received: {variable.path!r} of "
            f"shape {table.shape}, which would become {shape}."
        )
    first, grid = np.split(rows, [extra])
    places = [np.arange(n) % o for n, o in zip(after, before, strict=True)]
    grid = grid.reshape(*before, width)[np.ix_(*places)]
    return np.concatenate([first, grid.reshape(-1, width)]).reshape(shape)


def _copy_trainable(source, target):
    """Copies which layers and weights are trainable, the outer layers first."""
    # Whether a task holds its preprocessor, which has no weights, depends on Keras.
    layers = [[x for x in y._flatten_layers() if x.variables] for y in (source, target)]
    for a, b in zip(*layers, strict=True):
        b.trainable = a.trainable
    for a, b in zip(source.variables, target.variables, strict=True):
        b.trainable = a.trainable


# --- Larger inputs


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
