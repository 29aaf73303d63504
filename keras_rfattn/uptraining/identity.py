"""Identifies a training by the settings that its checkpoints store."""

import json

import keras

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.trained import checksum
from keras_rfattn.uptraining.selection import fresh_adapters

LONGEST = 300  # maximum number of characters of a value in an error message
SETTINGS = "stages", "trainable", "order", "objective", "window_dropout"


def identity(training):
    """Returns a dict of values that a `Training` shares with its checkpoints.

    A checkpoint belongs to the training only if all of them are equal. The number of
    steps is not among them, because a run may be extended.
    """
    settings, others = training.settings, {id(v) for v in training.of_maps}
    shapes = [list(v.shape) for v in training.trained]
    if "lora" in settings["trainable"].values():
        # Fresh adapters are random but do not change the softmax model, and they do
        # not exist yet when checkpoints are first read.
        others |= {id(v) for v in fresh_adapters(training.model)}
        shapes = settings["lora_rank"]
    own = [v for v in training.model.weights if id(v) not in others]
    optimizer, batches = settings["optimizer"], training.batches
    return {
        "backend": keras.backend.backend(),
        "softmax weights (checksum)": checksum(v.value for v in own),
        "first batch of data (checksum)": checksum(keras.tree.flatten(batches(0))),
        "shapes of trained weights, or lora_rank": shapes,
        "layer": {f"{i}": mechanism(x) for i, x in enumerate(training.layers)},
        "optimizer": optimizer and as_plain(optimizer),
        "seed": batches.seed,
        "batch_size": batches.batch_size,
        **{name: settings[name] for name in SETTINGS},
    }


def differences(saved, given):
    """Returns a list of lines that describe how two identities differ.

    The list is empty if they are equal. Layers that differ in the same way share a
    line.
    """
    saved, given, found = flat(saved), flat(given), {}
    for name in {**saved, **given}:
        values = tuple(
            f"{x[name]!r:.{LONGEST}}" if name in x else "nothing"
            for x in (saved, given)
        )
        if saved.get(name) != given.get(name) or (name in saved) != (name in given):
            layer, _, rest = name.removeprefix("layer ").partition(" ")
            if name.startswith("layer "):
                found.setdefault((rest, values), []).append(layer)
            else:
                found[name, values] = []
    return [
        f"{name}{' of layers ' * bool(layers)}{', '.join(layers)}: "
        f"saved {values[0]}, given {values[1]}"
        for (name, values), layers in found.items()
    ]


def flat(config, path=""):
    """Flattens nested dicts to keys such as `"optimizer config learning_rate"`."""
    if isinstance(config, list) and any(isinstance(x, dict) for x in config):
        config = {f"{i}": x for i, x in enumerate(config)}
    if not isinstance(config, dict):
        return {path: config}
    parts = (flat(x, f"{path} {k}".strip()) for k, x in config.items())
    return {k: x for part in parts for k, x in part.items()}


def mechanism(layer):
    """Returns the map and the options of a linear attention layer as plain values."""
    return {
        "feature_map": without_names(feature_maps.serialize(layer.feature_map)),
        **without_names(layer.options.config()),
        "dtype": layer.compute_dtype,
    }


def without_names(config):
    """Returns a config without names, which Keras makes up anew in each process."""
    if isinstance(config, dict):
        return {k: without_names(x) for k, x in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [without_names(x) for x in config]
    return config


def as_plain(optimizer):
    """Returns an optimizer's config as plain values, without automatic names."""
    found = keras.saving.serialize_keras_object(optimizer)
    kept = {k: found[k] for k in ("class_name", "config")}
    return json.loads(json.dumps(without_names(kept), default=repr))
