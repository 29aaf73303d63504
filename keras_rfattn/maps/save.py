"""Saves the trained maps of a model as a folder to publish: `save_maps`."""

import math
import numbers
import os
import pathlib
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import keras
import numpy as np

import keras_rfattn.maps.card as cards
import keras_rfattn.maps.folder as folders
import keras_rfattn.models.stable_names as stable_names
from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_flag
from keras_rfattn.backend.devices import backend_name
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.weights import as_numpy
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.fingerprint import fingerprint
from keras_rfattn.models.saving import map_config
from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class
from keras_rfattn.uptraining.report import UptrainingReport

DTYPES = ("float32", "float16")


def save_maps(
    model: keras.layers.Layer,
    folder: str | os.PathLike,
    *,
    dtype: str = "float32",
    report: Any = None,
    metrics: dict | None = None,
    base_model: str | None = None,
    data: str | None = None,
    command: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Saves the feature maps of a model.

    The folder holds `maps.json` (the mechanism and options of every layer, and a hash
    of the weights that the maps belong to), `maps.safetensors` and a model card,
    `README.md`. It has about a hundredth of the size of the model. `load_maps` applies
    it to the softmax checkpoint, on any backend, and `upload_maps` publishes it.

    Weights of the checkpoint itself are not saved, even if they were trained, and
    `load_maps` expects them as they are now, adapters (LoRA) included. Save them as
    usual: by `save_lora_weights`, `save_weights` or `save_to_preset`.

    Args:
        model: A model with linear attention.
        folder: Path of the folder to write.
        dtype: `"float32"` (default) or `"float16"`, which halves the size and rounds
            the weights.
        report: The `UptrainingReport` of the training, whose numbers go into the card.
        metrics: Dict from names to numbers or texts, the quality of the maps for the
            card, such as `{"share_of_softmax": 0.997}`.
        base_model: Name of the checkpoint, as its users know it.
        data: Description of the data that the maps were trained on.
        command: Command that trained the maps.
        license: Identifier of the licence of the maps, such as `"apache-2.0"`.
        overwrite: Whether to replace a set of maps that is in the folder already.

    Returns:
        The path of the folder, a `pathlib.Path`.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If the model has no linear attention, an argument is invalid, a
            weight is not finite or too large for `dtype`, or the folder holds
            something else.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "hedgehog")
        >>> folder = keras_rfattn.save_maps(model, "my_maps", overwrite=True)
        >>> sorted(file.name for file in folder.iterdir())
        ['README.md', 'maps.json', 'maps.safetensors']
    """
    check_model(model)
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {DTYPES}. Received: dtype={dtype!r}.")
    check_flag("overwrite", overwrite)
    if report is not None and not isinstance(report, UptrainingReport):
        raise ValueError(
            "`report` must be the `UptrainingReport` that `uptrain` returned. "
            f"Received: report={report!r:.80}."
        )
    metrics = _checked_metrics(metrics)
    texts = {"base_model": base_model, "data": data, "command": command}
    for name, text in {**texts, "license": license}.items():
        if text is not None and not isinstance(text, str):
            raise ValueError(f"`{name}` must be a string. Received: {text!r:.80}.")
    folder = _checked_folder(folder, overwrite)

    base = stable_names.base_of(model)
    weights = stable_names.weights_by_name(base, FeatureMap)
    sites = {
        id(x): name for name, x in stable_names.layers_by_name(base, FeatureMap).items()
    }
    linear = [site for site in survey(base) if site.is_linear]
    softmax = [site for site in survey(base) if not site.is_linear]
    if not linear:
        raise ValueError(
            f"`model` has no linear attention to save. Received: {title(model)}. Call "
            "`keras_rfattn.replace_attention` first."
        )
    arrays = {}
    for site in linear:
        feature_map = site.layer.feature_map
        prefix = f"{sites[id(site.layer)]}/{stable_names.MAP}"
        # Rounding would make a map look trained that is not.
        narrow = dtype if feature_map.was_trained else "float32"
        for name, weight in stable_names.weights_by_name(feature_map).items():
            arrays[f"{prefix}/{name}"] = _narrowed(f"{prefix}/{name}", weight, narrow)
    manifest = {
        "versions": {x: _version(x) for x in ("keras-rfattn", "keras", backend_name())},
        "base": {
            "class": original_class(base).__name__,
            "name": base_model,
            "weights": stable_names.hash_of(weights),
            "parameters": stable_names.parameters_of(weights),
        },
        "layers": [_layer_entry(sites[id(s.layer)], s.layer) for s in linear],
        "softmax": [sites[id(site.layer)] for site in softmax],
        "training": cards.training(report, data, command, license),
        "metrics": metrics,
    }
    folders.write(folder, manifest, arrays, cards.card(manifest, report, arrays))
    _warn_of_adapters(model, weights)
    return folder


def _layer_entry(name, layer):
    feature_map = layer.feature_map
    return {
        "path": name,
        "mechanism": feature_maps.name_of(feature_map),
        "width": None if feature_map.is_exact else feature_map.output_dim,
        "feature_map": map_config(layer),
        "options": layer.options.config(),
        "fingerprint": fingerprint(layer).tolist(),
    }


def _warn_of_adapters(model, weights):
    """Warns of adapters (LoRA), which a set does not hold."""
    adapters = sorted(stable_names.adapters(weights))
    if adapters:
        warnings.warn(
            f"The maps of {title(model)} are saved, but not its {len(adapters)} "
            f"weights of adapters (LoRA), such as {adapters[0]!r}. `load_maps` expects "
            "them as they are now. Save them by `save_lora_weights`.",
            stacklevel=3,
        )


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _narrowed(name, weight, dtype):
    """Returns a weight in the dtype of the file; integers keep theirs."""
    array = as_numpy(weight.value)
    if np.issubdtype(array.dtype, np.integer):
        return np.array(array, order="C")
    if not np.all(np.isfinite(array)):
        raise ValueError(
            f"Weights must be finite. Received: {name!r}, which is not. Restore "
            "weights from before training diverged."
        )
    with np.errstate(over="ignore"):
        narrow = np.array(array, dtype, order="C")
    if not np.all(np.isfinite(narrow)):
        raise ValueError(
            f"Weights must fit {dtype}. Received: {name!r} with entries up to "
            f"{np.max(np.abs(array)):.3g}. Use dtype='float32'."
        )
    return narrow


def _checked_metrics(metrics):
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, dict) or not all(
        isinstance(name, str)
        and (isinstance(x, str) or isinstance(x, numbers.Real) and math.isfinite(x))
        for name, x in metrics.items()
    ):
        raise ValueError(
            "`metrics` must be a dict from names to finite numbers or texts. Received: "
            f"metrics={metrics!r:.200}."
        )
    return {k: v if isinstance(v, str) else float(v) for k, v in metrics.items()}


def _checked_folder(folder, overwrite):
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder` must be a folder. Received: the file {folder}.")
    held = sorted(x.name for x in folder.iterdir()) if folder.exists() else []
    if folders.MANIFEST in held and not overwrite:
        raise ValueError(
            f"`folder` holds trained maps already. Received: {str(folder)!r}. Use "
            "another folder, or overwrite=True to replace them."
        )
    # A cloned repository of a hub has hidden files.
    others = [x for x in held if not x.startswith(".")]
    if others and folders.MANIFEST not in held:
        raise ValueError(
            "`folder` must be new, empty, or hold trained maps. Received: "
            f"{str(folder)!r} with {', '.join(sorted(others)[:4])}. Use another folder."
        )
    return folder
