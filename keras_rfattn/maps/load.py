"""Applies a folder of trained maps to a model: `load_maps`."""

import os
import warnings
from types import SimpleNamespace

import keras

import keras_rfattn.models.stable_names as stable_names
from keras_rfattn import feature_maps
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.fingerprint import agrees
from keras_rfattn.maps.base import distance
from keras_rfattn.maps.folder import damage, read
from keras_rfattn.maps.shipped import find
from keras_rfattn.models.replace import check_change, check_sites
from keras_rfattn.models.saving import commit
from keras_rfattn.models.swap import build_map
from keras_rfattn.ops.options import Options


def load_maps(
    model: keras.layers.Layer, source: str | os.PathLike, *, base: str | None = None
) -> keras.layers.Layer:
    """Makes a softmax checkpoint linear with maps that someone has trained, in place.

    If attention is already replaced in the same way, it only loads weights of maps.
    The model must have the weights that it had when its maps were saved, adapters
    (LoRA) included. Weights that differ no more than by rounding to 16 or 8 bits are
    accepted, and a warning tells the distance.

    Args:
        model: The built checkpoint that the maps belong to, or a model around it.
        source: A folder that `save_maps` wrote; the name of a set that ships with the
            package (see `pretrained_maps`); or an `"hf://user/name"`,
            `"kaggle://user/model/keras/variation"` or `"modelscope://user/name"` URI.
        base: `"any"` accepts other weights of the same class and shapes.

    Raises:
        ValueError: If the source is unknown or damaged, or the maps belong to another
            class, to other weights, layers or shapes. The model is then unchanged.
    """
    check_model(model)
    if base not in (None, "any"):
        raise ValueError(f"`base` must be None or 'any'. Received: base={base!r}.")
    folder = find(source)
    manifest, arrays = read(folder)
    about = f"{title(model)} must have the attention of the maps of {str(source)!r}"
    try:
        sites, changes, values = _match(model, manifest, arrays, about)
        away, text = (0, "") if base == "any" else distance(model, manifest["base"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(damage(folder, error)) from error
    if away > 1:
        raise ValueError(
            f"{title(model)} must have the weights with which the maps of "
            f"{str(source)!r} were saved. Received: weights {text}: another or a "
            "fine-tuned checkpoint, or one that lacks weights or adapters (LoRA) that "
            "were trained too. Load these first, or use base='any' and measure."
        )
    if away > 0:
        warnings.warn(
            f"The weights of {title(model)} are {text} from those of the maps of "
            f"{str(source)!r}, as after rounding to 16 or 8 bits.",
            stacklevel=2,
        )
    # The checks are complete: from here on, the model changes.
    commit(sites, changes)
    for variable, array in values:
        variable.assign(array)
    return model


def _match(model, manifest, arrays, about):
    """Returns sites, changes of softmax sites, and pairs of a variable and an array."""
    root = stable_names.base_of(model)
    sites = stable_names.sites_by_name(root, drop_window=True, drop_cap=True)
    entries = {entry["path"]: entry for entry in manifest["layers"]}
    entries |= dict.fromkeys(manifest["softmax"])
    if sites.keys() != entries.keys():
        raise ValueError(
            f"{about} of a {manifest['base']['class']}. Received: layers "
            f"{sorted(sites)}, where the maps have {sorted(entries)}. If the model "
            f"holds a {manifest['base']['class']} beside other attention, pass that."
        )
    check_sites(model, [site for name, site in sites.items() if entries[name]])
    changes, variables = [], {}
    for name, entry in entries.items():
        site, made = sites[name], sites[name].layer
        if site.is_linear and not (entry and agrees(made, entry["fingerprint"])):
            raise ValueError(
                f"{about}, or softmax attention. Received: another mechanism or window "
                f"at {name}. Call `restore_attention(model)` first."
            )
        if entry and not site.is_linear:
            made = _made(site, entry, about)
            changes.append((site, made.feature_map, made.options))
        if entry:
            of_map = stable_names.owned_by_name(made.feature_map).items()
            variables |= {f"{name}/feature_map/{k}": x for k, (x, _) in of_map}
    needed = {name: tuple(x.shape) for name, x in variables.items()}
    found = {name: x.shape for name, x in arrays.items()}
    wrong = sorted(x for x in needed | found if needed.get(x) != found.get(x))
    if wrong:
        raise ValueError(
            f"{about}. Received: heads that need {wrong[0]} of shape "
            f"{needed.get(wrong[0])}, and the file has {found.get(wrong[0])}."
        )
    return list(sites.values()), changes, [(x, arrays[k]) for k, x in variables.items()]


def _made(site, entry, about):
    """Returns the built map and the options of an entry of a manifest."""
    feature_map = feature_maps.get(entry["feature_map"])
    # Kernels are for a device that may be absent here.
    options = Options.take(entry["options"] | {"implementation": "auto"})
    check_change(feature_map, options, [site])
    build_map(site.layer, feature_map)
    made = SimpleNamespace(feature_map=feature_map, options=options)
    if not agrees(made, entry["fingerprint"]):
        raise ValueError(
            f"{about}. Received: {entry['path']}, whose mechanism this version of "
            "keras_rfattn builds otherwise. Use the version that saved the maps."
        )
    return made
