"""The "attention" entry in a container's config, which lists its linear layers.

A container is a layer or model that holds attention layers.
"""

import keras

import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.models.survey import survey

FORMAT = 1


def attention_config(container):
    """Returns the "attention" entry that a container saves in its config."""
    base = swap.original_class(container)
    return {
        # Keras' error for an unknown class quotes the config, and so shows this hint.
        "how_to_load": "import keras_rfattn",
        "format": FORMAT,
        "class": {
            "module": base.__module__,
            "class_name": base.__name__,
            "registered_name": keras.saving.get_registered_name(base),
        },
        "layers": [
            {
                "index": site.index,
                "path": site.lasting,
                "feature_map": map_config(site.layer),
                **site.layer.options.config(),
                **site.layer.saved_config(),
            }
            for site in survey(container)
            if site.is_linear
        ],
    }


def map_config(layer):
    """Returns the config of a layer's map, without the freeze of a frozen layer."""
    config = feature_maps.serialize(layer.feature_map)
    if not layer.trainable:
        # Many containers do not save the `trainable` flags of their inner layers.
        # After loading, only the map would still be frozen.
        config["config"]["trainable"] = True
    return config


def check_entry(entry, name):
    """Raises `ValueError` unless an entry has the form of `attention_config`'s."""
    if entry is None:
        raise ValueError(
            f"The config of {name} has no entry 'attention', so that its attention "
            "cannot be rebuilt. Save the model again with keras_rfattn."
        )
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        received = entry.get("format") if isinstance(entry, dict) else entry
        raise ValueError(
            f"The entry 'attention' in the config of {name} must be a dict of format "
            f"{FORMAT}, which this version of keras_rfattn reads. Received: "
            f"{received!r}. Use the version that saved it, or save the model again."
        )
    layers, described = entry.get("layers"), entry.get("class")
    keys = {"index", "path", "feature_map", "trained"}
    if (
        not isinstance(described, dict)
        or not isinstance(layers, list)
        or not all(isinstance(layer, dict) and keys <= set(layer) for layer in layers)
    ):
        raise ValueError(
            f"The entry 'attention' in the config of {name} must have a dict 'class' "
            f"and a list 'layers' of dicts with {sorted(keys)}. Received: {entry!r}. "
            "Save the model again."
        )
