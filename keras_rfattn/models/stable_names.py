"""Stable names of the layers and weights of a model.

Keras numbers automatic layer names in order of creation, so that paths can differ
between two processes. The names here depend on the model alone: automatic names lose
their number, and equal names inside one parent are told apart by a suffix such as `#2`.
"""

import re

import keras
from keras.src.utils.naming import to_snake_case

from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class


def base_of(model):
    """Returns the model that maps belong to: the backbone of a task, for instance."""
    sites = {id(site.layer) for site in survey(model)}
    models = [x for x in model._flatten_layers() if isinstance(x, keras.Model)]
    inner = {id(x): {id(y) for y in x._flatten_layers()} for x in models}
    around = [x for x in models if sites <= inner[id(x)]]
    return min(around, key=lambda x: len(inner[id(x)]), default=model)


def lasting_name(layer):
    """Returns the name of a layer; automatic names lose their number."""
    # Keras makes automatic names from the class name.
    automatic = to_snake_case(original_class(layer).__name__)
    is_automatic = re.fullmatch(rf"{automatic}_\d+", layer.name)
    return automatic if is_automatic else layer.name


def layers_by_name(root, skip=()):
    """Returns a dict from stable names to all layers in a layer, `""` for itself."""
    found, seen = {"": root}, {id(root)}

    def visit(layer, name):
        for child in layer._flatten_layers(include_self=False, recursive=False):
            if isinstance(child, skip) or id(child) in seen:
                continue
            seen.add(id(child))
            child_name = _unique(f"{name}/{lasting_name(child)}".lstrip("/"), found)
            found[child_name] = child
            visit(child, child_name)

    visit(root, "")
    return found


def sites_by_name(root, **options):
    """Returns a dict from stable names to the sites of attention, as `survey` does."""
    names = {id(layer): name for name, layer in layers_by_name(root).items()}
    return {names[id(site.layer)]: site for site in survey(root, **options)}


def owned_by_name(root, skip=()):
    """Returns a dict from stable names to pairs of a weight and its layer."""
    found, seen = {}, set()
    for name, layer in layers_by_name(root, skip).items():
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            if id(variable) not in seen:
                seen.add(id(variable))
                own = _unique(f"{name}/{variable.name}".lstrip("/"), found)
                found[own] = variable, layer
    return found


def _unique(name, taken):
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found
