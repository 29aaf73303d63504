"""Supports KerasHub's LoRA adapters in a backbone with linear attention.

KerasHub identifies a layer by its position among all layers that have weights. Here
feature maps are left out of that count, so that adapters of a softmax checkpoint load
into its linear model, and vice versa.
"""

import contextlib

from keras_rfattn.feature_maps import FeatureMap
from keras_rfattn.models.holders import following, refresh


@contextlib.contextmanager
def _without_maps(backbone):
    """Context manager in which a backbone's list of layers omits the feature maps."""
    if "_flatten_layers" in vars(backbone):
        # Already hidden: KerasHub's `load_lora_weights` may call `enable_lora`.
        yield
        return
    flatten = backbone._flatten_layers

    def flatten_without_maps(*args, **kwargs):
        layers = flatten(*args, **kwargs)
        maps = [x for x in layers if isinstance(x, FeatureMap)]
        hidden = {id(x) for m in maps for x in m._flatten_layers()}
        return [x for x in layers if id(x) not in hidden]

    vars(backbone)["_flatten_layers"] = flatten_without_maps
    try:
        yield
    finally:
        del vars(backbone)["_flatten_layers"]


def enable_lora(backbone, rank, target_layer_names=None):
    """Runs `Backbone.enable_lora`, which also freezes the feature maps."""
    with following([backbone]) as around, _without_maps(backbone):
        type(backbone).original_class.enable_lora(backbone, rank, target_layer_names)
    for layer in [backbone, *around]:
        refresh(layer)


def save_lora_weights(backbone, filepath):
    """Runs `Backbone.save_lora_weights`; the file fits the softmax model too."""
    with _without_maps(backbone):
        type(backbone).original_class.save_lora_weights(backbone, filepath)


def load_lora_weights(backbone, filepath):
    """Runs `Backbone.load_lora_weights` on a file from a softmax or a linear model."""
    with _without_maps(backbone):
        type(backbone).original_class.load_lora_weights(backbone, filepath)


MEMBERS = {
    "enable_lora": enable_lora,
    "save_lora_weights": save_lora_weights,
    "load_lora_weights": load_lora_weights,
}
