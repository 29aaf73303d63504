"""Applies a folder of trained maps to a model: `load_maps`."""

from types import SimpleNamespace

import keras_rfattn.maps.folder as folders
import keras_rfattn.maps.sources as sources
import keras_rfattn.maps.tree as tree
import keras_rfattn.models.saving as saving
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.trained import mark
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.fingerprint import agrees
from keras_rfattn.layers.implementation import check_options
from keras_rfattn.maps.card import summary
from keras_rfattn.maps.tree import MAP
from keras_rfattn.models.holders import holders, refresh
from keras_rfattn.models.survey import drop_sliding_windows, survey
from keras_rfattn.models.swap import original_class
from keras_rfattn.ops.options import Options


def load_maps(model, source, *, base=None):
    """Makes a softmax checkpoint linear with maps that someone has trained, in place.

    It replaces attention as it was replaced when the maps were saved, and loads their
    weights. On a model whose attention is already replaced in the same way, it only
    loads the weights. Everything is checked before anything changes.

    Args:
        model: The built checkpoint that the maps belong to, or a task or a model
            around it.
        source: A folder that `save_maps` wrote; the name of a set that ships with the
            package (see `pretrained_maps`); or an `"hf://user/name"`,
            `"kaggle://user/model/keras/variation"` or `"modelscope://user/name"` URI.
        base: `None` requires the weights of the checkpoint that the maps were trained
            with. `"any"` also accepts another checkpoint of the same class and shapes,
            a fine-tuned one for instance. `describe_attention` then says so.

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
    fit = Fit(model, source, manifest, arrays)
    pairs = fit.match_layers()
    is_of_base = fit.check_checkpoint(base == "any")
    fit.check_own_weights()
    changes = [(site, *fit.mechanism(site, entry)) for site, entry in pairs]
    values = [
        fit.weights_of_map(feature_map, entry)
        for (_, feature_map, _), (_, entry) in zip(changes, pairs, strict=True)
    ]
    # Nothing above changes the model, and nothing below fails.
    new = [change for change in changes if not change[0].is_linear]
    saving.commit(model, fit.sites, new)
    fit.assign_own_weights()
    own_paths = [fit.weights[name].path for name in manifest["own_weights"]]
    for (site, entry), pairs_of_map in zip(pairs, values, strict=True):
        layer = site.layer
        for variable, array in pairs_of_map:
            variable.assign(array)
        if not entry["is_trained"]:
            # Weights that were rounded must not count as trained.
            mark(layer.feature_map)
        layer.trained = tuple(dict.fromkeys([*layer.trained, *own_paths]))
        layer.origin = _origin(fit.source, entry, manifest, is_of_base)
    return model


class Fit:
    """Checks that maps fit a model, and finds what they change.

    Args:
        model: The model.
        source: Where the maps come from, for messages.
        manifest: The manifest of the maps.
        arrays: Dict from names to the arrays of the maps.
    """

    def __init__(self, model, source, manifest, arrays):
        self.model, self.source = model, str(source)
        self.manifest, self.arrays = manifest, arrays
        base = tree.base_of(model)
        own, wanted = original_class(base).__name__, manifest["base"]["class"]
        if own != wanted:
            raise ValueError(
                f"The maps of {self.source!r} belong to a {wanted}. Received: "
                f"{title(model)}, whose attention is in a {own}."
            )
        self.sites = survey(model)
        drop_sliding_windows(self.sites)
        self.layers = tree.layers_by_name(base, FeatureMap)
        self.weights = tree.weights_by_name(base, FeatureMap)

    def match_layers(self):
        """Returns pairs of a site and its entry in the manifest.

        Raises:
            ValueError: If the model lacks a layer of the maps, has attention that they
                do not know, or a layer cannot be changed as they need it.
        """
        names = {id(layer): name for name, layer in self.layers.items()}
        sites = {names[id(site.layer)]: site for site in self.sites}
        entries = {entry["path"]: entry for entry in self.manifest["layers"]}
        known = entries.keys() | set(self.manifest["softmax"])
        missing, surplus = known - sites.keys(), sites.keys() - known
        if missing or surplus:
            raise ValueError(
                f"The attention layers of {title(self.model)} must be those of the "
                f"maps of {self.source!r}. {_names('It lacks', missing)}"
                f"{_names('The maps do not know its', surplus)}"
            )
        linear = [name for name in self.manifest["softmax"] if sites[name].is_linear]
        linear += [
            name
            for name, entry in entries.items()
            if sites[name].is_linear
            and not agrees(sites[name].layer, entry["fingerprint"])
        ]
        if linear:
            raise ValueError(
                f"{title(self.model)} must have softmax attention, or attention that "
                f"was replaced as in the maps of {self.source!r}. Received: another "
                f"mechanism, other arguments or another window at {', '.join(linear)}. "
                "Call `restore_attention(model)` first."
            )
        pairs = [(sites[name], entry) for name, entry in entries.items()]
        refused = [f"{x.path}: {x.reason}" for x, _ in pairs if x.reason]
        if refused:
            raise ValueError(
                f"{title(self.model)} must have attention that can be made linear. "
                "Received:\n  " + "\n  ".join(refused)
            )
        return pairs

    def check_checkpoint(self, accepts_any):
        """Returns whether the model has the weights that the maps were trained with.

        Raises:
            ValueError: If it has others, unless `accepts_any` is true.
        """
        own = tree.hash_of(self.weights, self.manifest["own_weights"])
        is_same = own == self.manifest["base"]["weights"]
        if not is_same and not accepts_any:
            name = self.manifest["base"]["name"]
            raise ValueError(
                f"The maps of {self.source!r} were trained with the weights of "
                f"{repr(name) if name else 'another checkpoint'}. Received: "
                f"{title(self.model)}, whose weights are different. Load that "
                "checkpoint without changes, or pass base='any' to use the maps with "
                "these weights, and measure the quality."
            )
        return is_same

    def check_own_weights(self):
        """Checks the trained weights of the checkpoint, and the adapters."""
        for name in self.manifest["own_weights"]:
            variable, array = self.weights.get(name), self.arrays.get(name)
            shape = None if variable is None else tuple(variable.shape)
            if variable is None:
                shape = self._adapter_shape(name)
            if array is None or shape != array.shape:
                found = None if array is None else array.shape
                raise ValueError(
                    f"The maps of {self.source!r} hold {name!r} of shape {found}, a "
                    f"weight that was trained with them. Received: "
                    f"{title(self.model)}, where its shape is {shape}."
                )

    def _adapter_shape(self, name):
        """Returns the shape of an adapter that is still to be added, or `None`."""
        owner, _, kind = name.rpartition("/")
        adapter, layer = self.manifest["adapters"].get(owner), self.layers.get(owner)
        can_adapt = hasattr(layer, "enable_lora") and not layer.lora_enabled
        if adapter is None or not can_adapt or layer.kernel_constraint is not None:
            return None
        *inputs, outputs = layer.kernel.shape
        rank = adapter["rank"]
        shapes = {"lora_kernel_a": (*inputs, rank), "lora_kernel_b": (rank, outputs)}
        return shapes.get(kind)

    def mechanism(self, site, entry):
        """Returns the built feature map and the options of a layer."""
        if site.is_linear:
            return site.layer.feature_map, site.layer.options
        feature_map = feature_maps.get(entry["feature_map"])
        options = Options.take(dict(entry["options"]))
        check_options(options, feature_map)
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

    def weights_of_map(self, feature_map, entry):
        """Returns pairs of a variable of a map and the array to assign to it."""
        found, prefix = tree.weights_by_name(feature_map), f"{entry['path']}/{MAP}/"
        arrays = {
            name.removeprefix(prefix): array
            for name, array in self.arrays.items()
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

    def assign_own_weights(self):
        """Adds adapters, and assigns the trained weights of the checkpoint."""
        added = []
        for owner, adapter in self.manifest["adapters"].items():
            layer = self.layers[owner]
            if not layer.lora_enabled:
                layer.enable_lora(adapter["rank"], lora_alpha=adapter["alpha"])
                added.append(layer)
        for holder in holders(added):
            # Functions compiled before would keep running without the adapters.
            refresh(holder)
        if added:
            self.weights = tree.weights_by_name(self.layers[""], FeatureMap)
        for name in self.manifest["own_weights"]:
            self.weights[name].assign(self.arrays[name])


def _names(text, names):
    return f"{text} {', '.join(sorted(names))}. " if names else ""


def _origin(source, entry, manifest, is_of_base):
    parts = [source.rstrip("/").rpartition("/")[2], summary(entry, manifest)]
    if not is_of_base:
        parts.append("trained for another checkpoint")
    return ", ".join(part for part in parts if part)
