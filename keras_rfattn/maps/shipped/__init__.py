"""Finds sets of trained maps: those that ship with the package, folders and URIs."""

import os
import pathlib

import keras

from keras_rfattn.layers.checks import check_model
from keras_rfattn.maps.base import distance
from keras_rfattn.maps.folder import MANIFEST, WEIGHTS, read
from keras_rfattn.models.report import ADVISERS
from keras_rfattn.models.survey import survey

ROOT = pathlib.Path(__file__).parent
NAMES = sorted(x.parent.name for x in ROOT.glob(f"*/{MANIFEST}"))
HUBS = ("hf://", "kaggle://", "modelscope://")


def find(source):
    """Returns the local folder of a set of trained maps."""
    if isinstance(source, str) and source.startswith(HUBS):
        # KerasHub resolves all of these schemes for its presets.
        from keras_hub.src.utils.preset_utils import get_file

        files = [get_file(source, x) for x in (MANIFEST, WEIGHTS)]
        return pathlib.Path(files[0]).parent
    if isinstance(source, (str, os.PathLike)):
        folder = ROOT / source if source in NAMES else pathlib.Path(source).expanduser()
        if folder.is_dir():
            return folder
    raise ValueError(
        "`source` must be a folder that `save_maps` wrote, the name of a set that "
        f"ships with keras_rfattn ({', '.join(NAMES)}), or a URI that begins with "
        f"{', '.join(HUBS)}. Received: source={source!r}."
    )


def pretrained_maps(model: keras.layers.Layer | None = None) -> dict:
    """Lists the trained maps that ship with the package.

    Args:
        model: A built model, to list only the sets that were trained with its weights,
            up to rounding. `None` lists all sets.

    Returns:
        A dict from names, for `load_maps`, to texts: the checkpoint, a measure of the
        quality with softmax's, and how far the weights of `model` are.
    """
    if model is not None:
        check_model(model)
    found = {}
    for name in NAMES:
        manifest, _ = read(ROOT / name)
        away, text = (0, "") if model is None else distance(model, manifest["base"])
        if away <= 1:
            quality = manifest["metrics"]["quality"]
            found[name] = f"{manifest['base_model']}: {quality} {text}".rstrip()
    return found


def _advise(model):
    """Returns lines for `describe_attention` that name the shipped maps that fit."""
    sites = survey(model)
    linear = [site.layer for site in sites if site.is_linear]
    if not sites or any(layer.feature_map.was_trained for layer in linear):
        return []
    found = pretrained_maps(model).items()
    lines = [f"  load_maps(model, {name!r})  # {text}" for name, text in found]
    way = "after `keras_rfattn.restore_attention(model)`" if linear else "to load"
    return [f"Trained maps for this checkpoint, {way}:", *lines] if lines else []


ADVISERS.append(_advise)
