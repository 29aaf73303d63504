"""Sets of trained maps that ship with the package, one folder for each."""

import pathlib
from dataclasses import dataclass

import keras

import keras_rfattn.maps.folder as folders
import keras_rfattn.models.stable_names as stable_names
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.layers.checks import check_model
from keras_rfattn.maps.card import quality_of
from keras_rfattn.models.report import ADVISERS, aligned
from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class

ROOT = pathlib.Path(__file__).parent


def names():
    """Returns the names of the sets that ship with the package, sorted."""
    return sorted(x.parent.name for x in ROOT.glob(f"*/{folders.MANIFEST}"))


@dataclass(frozen=True)
class ShippedMaps:
    """One set of trained maps that ships with the package."""

    name: str  # to pass to `load_maps`
    base: str  # name of the checkpoint that the maps belong to
    mechanism: str  # registered name of the feature map
    width: int  # number of features
    quality: str  # a measure's name, its value and that of softmax attention
    size: int  # of the weights, in bytes


class ShippedTable(tuple):
    """A tuple of `ShippedMaps`, which prints as a table."""

    def __str__(self):
        table = [("name", "base", "mechanism", "width", "quality", "size")]
        for x in self:
            size = f"{x.size / 1e6:.2f} MB"
            table.append((x.name, x.base, x.mechanism, str(x.width), x.quality, size))
        return "\n".join(aligned(table))

    __repr__ = __str__


def pretrained_maps(model: keras.layers.Layer | None = None) -> tuple:
    """Lists the trained maps that ship with the package.

    Args:
        model: A built model, to list only the sets that were trained with its weights.
            `None` lists all sets.

    Returns:
        A tuple of `ShippedMaps`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If the model is not built.

    Examples:
        >>> sorted({x.base.split("/")[1] for x in keras_rfattn.pretrained_maps()})
        ['SmolLM2-135M-Instruct', 'all-MiniLM-L6-v2']
    """
    if model is not None:
        check_model(model)
        return ShippedTable(sets_for(model))
    return ShippedTable(map(_described, names()))


def _described(name):
    manifest = folders.read_manifest(ROOT / name)
    first, base = manifest["layers"][0], manifest["base"]
    return ShippedMaps(
        name,
        base["name"] or base["class"],
        first["mechanism"],
        first["width"],
        quality_of(manifest),
        (ROOT / name / folders.WEIGHTS).stat().st_size,
    )


def sets_for(model):
    """Returns the `ShippedMaps` that were trained with the weights of a model."""
    if not survey(model):
        return []
    base, found, own = stable_names.base_of(model), [], None
    for name in names():
        manifest = folders.read_manifest(ROOT / name)
        if manifest["base"]["class"] != original_class(base).__name__:
            continue
        # Hashing takes a while for large models, so that sizes are compared first.
        weights = stable_names.weights_by_name(base, FeatureMap)
        if manifest["base"]["parameters"] != stable_names.parameters_of(weights):
            continue
        own = own or stable_names.checkpoint_hash(model)
        if own == manifest["base"]["weights"]:
            found.append(_described(name))
    return found


def _advise(model):
    """Returns lines for `describe_attention` that name the shipped maps that fit."""
    linear = [site.layer for site in survey(model) if site.is_linear]
    if any(layer.feature_map.was_trained for layer in linear):
        return []
    lines = [f"  load_maps(model, {x.name!r})  # {x.quality}" for x in sets_for(model)]
    way = "after `keras_rfattn.restore_attention(model)`" if linear else "to load"
    return [f"Trained maps for this checkpoint, {way}:", *lines] if lines else []


ADVISERS.append(_advise)
