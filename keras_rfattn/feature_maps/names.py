"""Fixed names for the sublayers of a map, so that the paths of weights never change.

Keras numbers the automatic names of layers in order of creation. The path of a weight
would depend on which layers were created before, and assigning weights by path would
fail.
"""

import re

import keras
from keras.src.utils.naming import to_snake_case

OF_BACKENDS = "_layers", "_self_"


def fix_name(layer, name):
    """Names a layer that has an automatic name, and all layers inside it."""
    automatic = rf"{to_snake_case(type(layer).__name__)}(_\d+)?"
    if not layer.built and re.fullmatch(automatic, layer.name):
        layer.name = name
    # PyTorch stores submodules in `_modules`, not with the other attributes.
    attributes = dict(vars(layer))
    attributes.update(attributes.pop("_modules", {}))
    # The lists of all sublayers that Keras and TensorFlow keep come last, because
    # attributes give better names.
    for attribute in sorted(attributes, key=lambda x: x.startswith(OF_BACKENDS)):
        fix_names(attribute, attributes[attribute])


def fix_names(attribute, value):
    """Names the layers of an attribute after it: one, or a list or dict of them."""
    attribute = attribute.lstrip("_")
    if isinstance(value, keras.layers.Layer):
        fix_name(value, attribute)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            fix_names(f"{attribute}_{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            fix_names(f"{attribute}_{key}", item)
