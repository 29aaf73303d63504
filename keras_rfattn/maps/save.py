"""Saves the trained maps of a model as a folder to publish: `save_maps`."""

import json
import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np

import keras_rfattn.models.stable_names as stable_names
from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_flag
from keras_rfattn.feature_maps.weights import as_numpy
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.fingerprint import fingerprint
from keras_rfattn.maps.base import entry_of
from keras_rfattn.maps.folder import MANIFEST, write
from keras_rfattn.models.saving import map_config


def save_maps(
    model: keras.layers.Layer,
    folder: str | os.PathLike,
    *,
    report: Any = None,
    metrics: dict | None = None,
    base_model: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Saves the feature maps of a model as a folder of about a hundredth of its size.

    Weights of the checkpoint itself are not saved, even if they were trained, and
    `load_maps` expects them as they are now, adapters (LoRA) included. Save them by
    `save_lora_weights`, `save_weights` or `save_to_preset`. A warning says so if the
    model has adapters, or if `report` names trained weights of the checkpoint.

    Args:
        model: A model with linear attention.
        folder: Path of the folder to write.
        report: The `UptrainingReport` of the training, for the card.
        metrics: Dict from names to numbers or texts for the card: the quality of the
            maps, such as `{"share_of_softmax": 0.997}`, their data, the command.
        base_model: Name of the checkpoint, as its users know it.
        license: Identifier of the licence of the maps, such as `"apache-2.0"`.
        overwrite: Whether to replace a set of maps that is in the folder already.
    """
    check_model(model)
    check_flag("overwrite", overwrite)
    folder = pathlib.Path(folder)
    # A cloned repository of a hub has hidden files.
    held = sorted(x.name for x in folder.glob("[!.]*"))
    if held and not (overwrite and MANIFEST in held):
        raise ValueError(
            "`folder` must be new, empty, or hold trained maps that `overwrite=True` "
            f"replaces. Received: {str(folder)!r} with {', '.join(held[:4])}, and "
            f"overwrite={overwrite}. Use another folder."
        )
    manifest = {"base_model": base_model, "license": license}
    try:
        manifest["metrics"] = dict(metrics or {})
        json.dumps(manifest, allow_nan=False)
        manifest["training"] = [] if report is None else str(report).splitlines()
        trained = () if report is None else report.trained
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            "`metrics` must be a dict from names to finite numbers or texts, and "
            f"`report` what `uptrain` returned. Received: {error}."
        ) from error
    sites = stable_names.sites_by_name(stable_names.base_of(model))
    linear = {name: site.layer for name, site in sites.items() if site.is_linear}
    if not linear:
        raise ValueError(
            f"`model` has no linear attention to save. Received: {title(model)}. Call "
            "`keras_rfattn.replace_attention` first."
        )
    arrays = {
        f"{name}/feature_map/{end}": np.array(as_numpy(weight.value), order="C")
        for name, layer in linear.items()
        for end, (weight, _) in stable_names.owned_by_name(layer.feature_map).items()
    }
    bad = [name for name, array in arrays.items() if not np.all(np.isfinite(array))]
    if bad:
        raise ValueError(
            f"Weights must be finite. Received: {bad[0]!r}, which is not. Restore "
            "weights from before training diverged."
        )
    base = entry_of(model)
    layers = [_entry_of(name, layer) for name, layer in linear.items()]
    softmax = [name for name in sites if name not in linear]
    manifest |= {"base": base, "layers": layers, "softmax": softmax}
    write(folder, manifest, arrays)
    trained = base["adapters"] or trained
    if trained:
        warnings.warn(
            f"The maps of {title(model)} are saved without the checkpoint's trained "
            f"weights, such as {trained[0]!r}, which `load_maps` expects as they are "
            "now. Use `save_lora_weights`, `save_weights` or `save_to_preset`.",
            stacklevel=2,
        )
    return folder


def _entry_of(name, layer):
    feature_map = layer.feature_map
    return {
        "path": name,
        "mechanism": feature_maps.name_of(feature_map),
        "width": None if feature_map.is_exact else feature_map.output_dim,
        "feature_map": map_config(layer),
        "options": layer.options.config(),
        "fingerprint": fingerprint(layer).tolist(),
    }
