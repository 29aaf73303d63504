"""Applies a folder of trained maps to a model: `load_maps`."""

import dataclasses
import os
from types import SimpleNamespace

import keras

import keras_rfattn.maps.folder as folders
import keras_rfattn.maps.sources as sources
import keras_rfattn.models.saving as saving
import keras_rfattn.models.stable_names as stable_names
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.fingerprint import agrees
from keras_rfattn.models.replace import check_change, check_sites
from keras_rfattn.models.stable_names import MAP
from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class
from keras_rfattn.ops.options import Options


def load_maps(
    model: keras.layers.Layer,
    source: str | os.PathLike,
    *,
    base: str | None = None,
    block_size: int | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
) -> keras.layers.Layer:
    """Makes a softmax checkpoint linear with maps that someone has trained, in place.

    It replaces attention by the saved mechanism and options, layer by layer, and loads
    the weights of the maps. On a model whose attention is already replaced in the same
    way, it only loads these weights. If weights of the checkpoint were trained with the
    maps, such as adapters (LoRA), load those first. If the maps were trained without
    the sliding window or the soft cap of the model (`drop_sliding_window` and
    `drop_soft_cap` of `replace_attention`), it ignores these too.
    Everything is checked before anything changes.

    Args:
        model: The built checkpoint that the maps belong to, or a task or a model
            around it.
        source: A folder that `save_maps` wrote; the name of a set that ships with the
            package (see `pretrained_maps`); or an `"hf://user/name"`,
            `"kaggle://user/model/keras/variation"` or `"modelscope://user/name"` URI.
        base: `None` requires the weights of the model whose maps were saved. `"any"`
            also accepts another checkpoint of the same class and shapes, a fine-tuned
            one for instance.
        block_size: This and the following are `keras_rfattn.ops.Options` that maps can
            be given anew, because they do not change what was trained, for example on
            another device. `None` keeps the saved one.
        max_segments: As `block_size`.
        implementation: As `block_size`.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ImportError: If a URI needs a package that is not installed.
        FileNotFoundError: If a hub has no such maps.
        ValueError: If the source is unknown; if its files are damaged, or were written
            by a newer version; or if the maps belong to another class, to other
            weights, layers or shapes. The model is unchanged in all of these cases.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "hedgehog")
        >>> folder = keras_rfattn.save_maps(model, "own_maps", overwrite=True)
        >>> model = keras_rfattn.restore_attention(model)
        >>> model = keras_rfattn.load_maps(model, "own_maps")
        >>> keras_rfattn.describe_attention(model).rows[0].mechanism
        'hedgehog'
    """
    check_model(model)
    if base not in (None, "any"):
        raise ValueError(f"`base` must be None or 'any'. Received: base={base!r}.")
    folder = sources.find(source)
    manifest = folders.read_manifest(folder)
    arrays = folders.read_arrays(folder, manifest)
    matcher = Matcher(model, source, manifest)
    pairs = matcher.match_layers()
    if base is None:
        matcher.check_checkpoint()
    chosen = {
        "block_size": block_size,
        "max_segments": max_segments,
        "implementation": implementation,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    changes, values = [], []
    for site, entry in pairs:
        feature_map, options = matcher.build(site, entry, chosen)
        check_change(feature_map, options, [site])
        changes.append((site, feature_map, options))
        values += matcher.weights_of_map(feature_map, entry, arrays)

    # The checks are complete: from here on, the model changes.
    saving.commit(matcher.sites, [x for x in changes if not x[0].is_linear])
    for site, _, options in changes:
        site.layer.options = options
    for variable, array in values:
        variable.assign(array)
    return model


class Matcher:
    """Checks that maps fit a model, and finds what they change."""

    def __init__(self, model, source, manifest):
        self.model, self.source, self.manifest = model, str(source), manifest
        base = stable_names.base_of(model)
        own, wanted = original_class(base).__name__, manifest["base"]["class"]
        if own != wanted:
            raise ValueError(
                f"The maps of {self.source!r} belong to a {wanted}. Received: "
                f"{title(model)}, whose attention is in a {own}. If the model holds a "
                f"{wanted} beside other attention, pass the {wanted}."
            )
        self.sites = survey(model, drop_window=True, drop_cap=True)
        self.layers = stable_names.layers_by_name(base, FeatureMap)

    def match_layers(self):
        """Returns pairs of a site and its entry in the manifest."""
        names = {id(layer): name for name, layer in self.layers.items()}
        sites = {names[id(site.layer)]: site for site in self.sites}
        entries = {entry["path"]: entry for entry in self.manifest["layers"]}
        entries |= dict.fromkeys(self.manifest["softmax"])
        missing, surplus = entries.keys() - sites.keys(), sites.keys() - entries.keys()
        if missing or surplus:
            raise ValueError(
                f"The attention layers of {title(self.model)} must be those of the "
                f"maps of {self.source!r}. {_names('It lacks', missing)}"
                f"{_names('The maps do not know its', surplus)}"
            )
        linear = [
            name
            for name, entry in entries.items()
            if sites[name].is_linear
            and not (entry and agrees(sites[name].layer, entry["fingerprint"]))
        ]
        if linear:
            raise ValueError(
                f"{title(self.model)} must have softmax attention, or attention that "
                f"was replaced as in the maps of {self.source!r}. Received: another "
                f"mechanism, other arguments or another window at {', '.join(linear)}. "
                "Call `restore_attention(model)` first."
            )
        pairs = [(sites[name], entry) for name, entry in entries.items() if entry]
        check_sites(self.model, [site for site, _ in pairs])
        return pairs

    def check_checkpoint(self):
        """Raises `ValueError` unless the model has the weights of the maps."""
        own = stable_names.checkpoint_hash(self.model)
        if own != self.manifest["base"]["weights"]:
            name = self.manifest["base"].get("name")
            raise ValueError(
                f"The maps of {self.source!r} were saved with the weights of "
                f"{repr(name) if name else 'another checkpoint'}. Received: "
                f"{title(self.model)}, whose weights are different: another "
                "checkpoint, a fine-tuned, a quantized or a float16 one, or one that "
                "lacks weights or adapters that were trained with the maps. Load these "
                "weights first, or pass base='any' to use the maps with the model's "
                "weights, and measure the quality."
            )

    def build(self, site, entry, chosen):
        """Returns the built map of a layer, and its options, some of them chosen."""
        if site.is_linear:
            own = site.layer
            return own.feature_map, dataclasses.replace(own.options, **chosen)
        try:
            feature_map = feature_maps.get(entry["feature_map"])
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"The maps of {self.source!r} use the mechanism "
                f"{entry['mechanism']!r}, which cannot be made here. Import the "
                f"package that defines it first. The error was: {error}"
            ) from error
        options = Options.take(entry["options"] | chosen)
        swap.build_map(site.layer, feature_map)
        described = SimpleNamespace(feature_map=feature_map, options=options)
        if not agrees(described, entry["fingerprint"]):
            raise ValueError(
                f"The entry of {entry['path']!r} in the manifest of {self.source!r} "
                "does not describe the mechanism that was saved: the manifest was "
                "changed, or this version of keras_rfattn builds it differently. Get "
                "the folder again, or use the version that saved it: "
                f"{self.manifest['versions']}."
            )
        return feature_map, options

    def weights_of_map(self, feature_map, entry, arrays):
        """Returns pairs of a variable of a map and the array to assign to it."""
        found = stable_names.weights_by_name(feature_map)
        prefix = f"{entry['path']}/{MAP}/"
        arrays = {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }
        shapes = {name: tuple(variable.shape) for name, variable in found.items()}
        saved = {name: array.shape for name, array in arrays.items()}
        if shapes != saved:
            names = sorted(shapes.keys() | saved.keys())
            name = next(x for x in names if shapes.get(x) != saved.get(x))
            raise ValueError(
                f"The maps of {self.source!r} must fit the heads of "
                f"{entry['path']!r}. Received: {name!r} of shape {saved.get(name)}, "
                f"where {title(self.model)} needs {shapes.get(name)}."
            )
        return [(variable, arrays[name]) for name, variable in found.items()]


def _names(text, names):
    return f"{text} {', '.join(sorted(names))}. " if names else ""
