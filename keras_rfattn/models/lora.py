"""Supports KerasHub's LoRA adapters in a backbone with linear attention.

KerasHub identifies a layer by its position among all layers that have weights. Here
feature maps are left out of that count, so that adapters of a softmax checkpoint load
into its linear model, and vice versa.
"""

import contextlib

from keras_rfattn.feature_maps import FeatureMap
from keras_rfattn.models.holders import holders, refresh
from keras_rfattn.models.optimizers import following


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
    with following([backbone]), _without_maps(backbone):
        type(backbone).original_class.enable_lora(backbone, rank, target_layer_names)
    _refresh(backbone)


def save_lora_weights(backbone, filepath):
    """Runs `Backbone.save_lora_weights`; the file fits the softmax model too."""
    with _without_maps(backbone):
        type(backbone).original_class.save_lora_weights(backbone, filepath)


def load_lora_weights(backbone, filepath):
    """Runs `Backbone.load_lora_weights` on a file from a softmax or a linear model."""
    with _without_maps(backbone):
        _check(backbone, filepath)
        type(backbone).original_class.load_lora_weights(backbone, filepath)
    _refresh(backbone)


def _refresh(backbone):
    """Discards functions that were compiled without the adapters."""
    for layer in [backbone, *holders([backbone])]:
        refresh(layer)


def _check(backbone, filepath):
    rank, saved = _saved(filepath)
    layers = [x for x in backbone._flatten_layers(include_self=False) if x.weights]
    places = getattr(backbone, "_lora_enabled_layers", [])
    is_fresh = not places
    if is_fresh:
        names = backbone.default_lora_layer_names()
        places = [
            i
            for i, x in enumerate(layers)
            if x.name in names and hasattr(x, "enable_lora")
        ]
        own = [layers[i].path for i in places if layers[i].lora_enabled]
        if own:
            raise ValueError(
                f"{type(backbone).__name__} has adapters that `enable_lora` of the "
                f"backbone did not add. Received: {own}. Load them into a backbone "
                "without adapters."
            )
    wanted = {i: _shapes(layers[i], rank) for i in places}
    if wanted.keys() == saved.keys() and all(
        None in (a, b) or a == b
        for i in wanted
        for a, b in zip(wanted[i], saved[i], strict=True)
    ):
        return
    if not is_fresh and rank != backbone._lora_rank:
        # KerasHub's loader raises its own error for a different rank.
        return
    raise ValueError(
        "The file must hold adapters of the same layers as the backbone. Received: "
        f"filepath={str(filepath)!r}, with adapters of {_listing(saved)}; "
        f"{type(backbone).__name__} has {_listing(wanted)} (position: shapes). Load "
        "the file into the model that it was saved from, or call `enable_lora` with "
        "the same `target_layer_names` first."
    )


def _saved(filepath):
    """Returns the LoRA rank in a file, and its adapters' shapes by layer position."""
    import h5py

    with h5py.File(filepath, "r") as file:
        if "lora/vars/rank" not in file:
            raise ValueError(
                "`filepath` must be a file from `save_lora_weights`. Received: "
                f"filepath={str(filepath)!r}, which has no 'lora/vars/rank'."
            )
        rank, groups = int(file["lora/vars/rank"][()]), file["lora"]
        names = "lora_kernel_a", "lora_kernel_b"
        return rank, {
            int(name): [tuple(groups[name]["vars"][x].shape) for x in names]
            for name in groups
            if name.isdigit()
        }


def _shapes(layer, rank):
    """Returns the shapes of a layer's two adapters, `None` where they are unknown."""
    if layer.lora_enabled:
        return [tuple(x.shape) for x in (layer.lora_kernel_a, layer.lora_kernel_b)]
    if layer.quantization_mode is not None:
        return [None, None]
    *inputs, outputs = layer.kernel.shape
    return [(*inputs, rank), (rank, outputs)]


def _listing(shapes):
    return ", ".join(f"{i}: {a}, {b}" for i, (a, b) in sorted(shapes.items()))


MEMBERS = {
    "enable_lora": enable_lora,
    "save_lora_weights": save_lora_weights,
    "load_lora_weights": load_lora_weights,
}
