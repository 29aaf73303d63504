"""Extends learned position tables, so that a checkpoint takes longer inputs."""

import math
import tempfile

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import is_integer
from keras_rfattn.layers.checks import check_model, title


def extend_positions(
    model: keras.Model, max_length: int | tuple[int, int]
) -> keras.Model:
    """Copies a model with a larger table of learned positions, for longer inputs.

    Linear attention pays off at lengths that most checkpoints cannot take: BERT has
    512 positions, GPT-2 has 1024, and a ViT has its training grid. The copy is rebuilt
    from the model's config with a larger table, which repeats the old one, so that
    every position keeps a trained embedding. Every other weight and the tokenizer
    are copied, replaced attention stays replaced, and the preprocessor of the copy
    gives inputs of the new length (`longer.preprocessor.sequence_length = 512` cuts
    texts earlier).

    Args:
        model: A KerasHub backbone or task with learned absolute positions, or a model
            that holds one backbone, such as `keras.Model(inputs, head(backbone(...)))`.
            This model does not change.
        max_length: The new number of positions for text, at least the old one; the new
            `(height, width)` in pixels for images. If a model around the backbone has
            inputs of the old size, they get the new size.

    Returns:
        A new model of the same class, compiled only if its constructor compiles it.

    Raises:
        ValueError: If the model has no learned positions or several backbones, cannot
            be rebuilt from its config, or has other weights that depend on the length;
            or if `max_length` is invalid.
        TypeError: If `model` is not a Keras model.

    Examples:
        >>> import keras_hub
        >>> model = keras_hub.models.BertBackbone(
        ...     vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        ...     intermediate_dim=16, max_sequence_length=8)
        >>> keras_rfattn.extend_positions(model, 32).max_sequence_length
        32
    """
    check_model(model)
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a KerasHub backbone or task, or a `keras.Model` around "
            f"one. Received: {title(model)}, which is a layer."
        )
    try:
        config = keras.saving.serialize_keras_object(model)
    except NotImplementedError as error:
        raise _not_rebuilt(model, "its class has no `get_config`") from error
    for inner in _dicts(config):
        inner.pop("build_config", None)
        inner.pop("compile_config", None)
    old, new = _resize(_sized(config, model), max_length, title(model))
    _resize_inputs(config, old, new)
    if old != new:
        _resize_preprocessors(config, new)
    extended = _rebuilt(config, model)
    pairs = zip(_layers_with_state(model), _layers_with_state(extended), strict=True)
    for pair in pairs:
        _copy_state(*pair)
    _copy_weights(model, extended, old, new)
    return extended


def _rebuilt(config, model):
    try:
        extended = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _not_rebuilt(model, f"Keras says: {reason:.200}") from error
    count = len(extended.variables)
    if count != len(model.variables):
        raise _not_rebuilt(
            model,
            f"its copy has {count} weights instead of {len(model.variables)}, which "
            "happens if LoRA or quantization was added after the model was built",
        )
    return extended


def _not_rebuilt(model, reason):
    return ValueError(
        "`model` must be one that Keras can rebuild from its config. Received: "
        f"{title(model)} ({reason}). First extend the backbone with "
        "`keras_rfattn.extend_positions(backbone, ...)`, then build the model around "
        "the extended backbone."
    )


def _dicts(config):
    """Yields each dict in a nested config, the outer ones first."""
    if isinstance(config, dict):
        yield config
    for value in config.values() if isinstance(config, dict) else config:
        if isinstance(value, (dict, list, tuple)):
            yield from _dicts(value)


def _sized(config, model):
    """Returns the one config inside `config` that holds the size of the inputs."""
    found = []
    for inner in _dicts(config):
        is_below = any(inner is x for y in found for x in _dicts(y))
        if not is_below and ("max_sequence_length" in inner or "image_shape" in inner):
            found.append(inner)
    if len(found) == 1:
        return found[0]
    way_out = "Use a KerasHub backbone with a position table."
    if found:
        way_out = "Extend each of them, then build the model around the extended ones."
    raise ValueError(
        "`model` must hold one backbone with learned positions (`max_sequence_length` "
        f"or `image_shape` in its config). Received: {title(model)} with {len(found)} "
        f"such backbones or encoders. {way_out}"
    )


def _resize(config, max_length, name):
    """Writes the new size into a backbone's config; returns old and new, as tuples."""
    is_text = "image_shape" not in config
    if is_text:
        old, size = (config["max_sequence_length"],), (max_length,)
        wanted = f"an integer of at least {old[0]}, the number of positions of {name}"
    else:
        shape = list(config["image_shape"])
        data_format = config.get("data_format") or keras.config.image_data_format()
        start = int(data_format == "channels_first" and len(shape) == 3)
        old, size = tuple(shape[start : start + 2]), max_length
        wanted = f"the new (height, width), at least {old}, the image size of {name}"
    has_length = isinstance(size, (tuple, list)) and len(size) == len(old)
    if not has_length or any(
        not is_integer(n) or n < o for n, o in zip(size, old, strict=True)
    ):
        raise ValueError(
            f"`max_length` must be {wanted}. Received: max_length={max_length!r}."
        )
    new = tuple(map(int, size))
    if is_text:
        config["max_sequence_length"] = new[0]
    else:
        config["image_shape"] = [*shape[:start], *new, *shape[start + 2 :]]
    return old, new


def _resize_inputs(config, old, new):
    """Writes the new size into each `InputLayer` config that has the old size."""
    # Tokens are (B, T); images (B, H, W, C) or (B, C, H, W).
    rank, starts = (2, (1,)) if len(old) == 1 else (4, (1, 2))
    for layer in _dicts(config):
        if layer.get("class_name") != "InputLayer":
            continue
        inner = layer["config"]
        shape = list(inner.get("batch_shape") or ())
        if len(shape) != rank:
            continue
        for start in starts:
            end = start + len(old)
            if tuple(shape[start:end]) == old:
                inner["batch_shape"] = [*shape[:start], *new, *shape[end:]]
                break


def _resize_preprocessors(config, new):
    """Writes the new size into the config of each preprocessor of a task."""
    for task in _dicts(config):
        for inner in _dicts(task.get("preprocessor") or ()):
            for name, value in inner.items():
                if name.endswith("sequence_length") and len(new) == 1:
                    inner[name] = value and max(value, *new)
                elif name == "image_size" and len(new) == 2:
                    inner[name] = list(new)


def _layers_with_state(model):
    """Returns layers of a model and its preprocessors that keep more than weights."""
    layers = list(model._flatten_layers())
    # Whether a task tracks its preprocessor depends on the backend.
    for preprocessor in [getattr(x, "preprocessor", None) for x in layers]:
        if isinstance(preprocessor, keras.layers.Layer):
            layers += preprocessor._flatten_layers()
    default = keras.layers.Layer.load_own_variables
    return [
        layer
        for layer in dict.fromkeys(layers)
        if hasattr(layer, "save_assets")
        or type(layer).load_own_variables is not default
    ]


def _copy_state(source, target):
    """Copies the state of a layer as Keras saves and loads it."""
    shapes = [[tuple(v.shape) for v in x.weights] for x in (source, target)]
    if shapes[0] == shapes[1]:
        store = {}
        source.save_own_variables(store)
        target.load_own_variables(store)
    if hasattr(source, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            source.save_assets(folder)
            target.load_assets(folder)


def _copy_weights(source, target, old, new):
    pairs = list(zip(source.variables, target.variables, strict=True))
    tables = [(a, b) for a, b in pairs if tuple(a.shape) != tuple(b.shape)]
    if not tables and old != new:
        raise ValueError(
            f"`model` must have learned positions. Received: {title(source)}, "
            f"which has no weight that depends on its length ({old} to {new})."
        )
    _check_tables(tables, old, new)
    for a, b in pairs:
        if tuple(a.shape) == tuple(b.shape):
            # The NumPy copy keeps the models apart: on JAX they would otherwise share
            # one buffer, which `fit` donates.
            b.assign(ops.convert_to_numpy(a))
        elif "float" in keras.backend.standardize_dtype(a.dtype):
            table = np.asarray(ops.convert_to_numpy(a), dtype="float32")
            b.assign(_grown(table, b.shape, old, new))


def _check_tables(tables, old, new):
    """Raises `ValueError` unless all weights of other shapes are position tables."""
    for a, b in tables:
        if len(new) == 1:
            is_table = a.shape[-1:] == b.shape[-1:] or len(a.shape) == 1
            places = -1 if len(a.shape) == 1 else -2
            is_table = is_table and b.shape[places] - a.shape[places] == new[0] - old[0]
        else:
            is_table = len(a.shape) < 2 or a.shape[-1] == b.shape[-1]
        if not is_table:
            raise ValueError(
                "`model` must have no weights other than position tables that depend "
                f"on the length of its inputs. Received: a weight {a.path!r} of shape "
                f"{tuple(a.shape)}, which would become {tuple(b.shape)}. Use layers "
                "that pool over tokens instead of layers that flatten them."
            )


def _grown(table, shape, old, new):
    """Repeats the positions in a table; rows before them, as class tokens, stay."""
    width = table.shape[-1] if table.ndim > 1 else 1
    rows = table.reshape(-1, width)
    patch = _patch_size(len(rows), math.prod(shape) // width, old, new)
    before, after = ([n // patch for n in size] for size in (old, new))
    first, grid = np.split(rows, [len(rows) - math.prod(before)])
    places = [np.arange(n) % o for n, o in zip(after, before, strict=True)]
    grid = grid.reshape(*before, width)[np.ix_(*places)]
    return np.concatenate([first, grid.reshape(-1, width)]).reshape(shape)


def _patch_size(rows, wanted, old, new):
    """Finds the patch size (1 for text) that leaves equally many rows before grids."""
    for patch in range(1, min(old) + 1):
        before, after = ([n // patch for n in size] for size in (old, new))
        extra = rows - math.prod(before)
        if 0 <= extra <= 8 and wanted - math.prod(after) == extra and before != after:
            return patch
    raise ValueError(
        "`model` must have square patches. Received: position tables of "
        f"{rows} rows for an image of {old} pixels and of {wanted} rows for {new}."
    )
