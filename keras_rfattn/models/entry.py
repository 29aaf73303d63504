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
                "path": site.path,
                "feature_map": map_config(site.layer),
                **site.layer.options.config(),
                "self_attention": site.layer.self_attention,
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
    """Raises `ValueError` unless an entry is one that `attention_config` returns."""
    is_known = isinstance(entry, dict) and entry.get("format") == FORMAT
    if not is_known or not isinstance(entry.get("layers"), list):
        raise ValueError(
            f"The config of {name} must have an entry 'attention' of format {FORMAT}, "
            f"which this version of keras_rfattn reads. Received: {entry!r:.200}. Use "
            "the version that saved it, or save the model again."
        )
