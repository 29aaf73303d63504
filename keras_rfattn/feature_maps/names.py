"""Fixed names for the parts of a map, so that the paths of weights never change.

Keras names layers by counting those of the process. A weight's path would then depend
on what else was made before, and weights assigned by path would land nowhere.
"""

import re

import keras
from keras.src.utils.naming import to_snake_case

OF_BACKENDS = "_layers", "_self_"


class FixedNames:
    """Mixin of Keras layers that name their sublayers after attributes."""

    def __setattr__(self, name, value):
        fix_names(name, value)
        super().__setattr__(name, value)


def fix_name(layer, name):
    """Names a layer that has an automatic name, and all layers inside it.

    Args:
        layer: A Keras layer. One that is built keeps its name, as its weights do.
        name: The new name. A layer that was named on purpose keeps its own.
    """
    automatic = rf"{to_snake_case(type(layer).__name__)}(_\d+)?"
    if not layer.built and re.fullmatch(automatic, layer.name):
        layer.name = name
    # PyTorch keeps modules apart from other attributes.
    attributes = dict(vars(layer))
    attributes.update(attributes.pop("_modules", {}))
    # Keras' and TensorFlow's own lists of all sublayers come last: attributes give
    # better names.
    for attribute in sorted(attributes, key=lambda x: x.startswith(OF_BACKENDS)):
        fix_names(attribute, attributes[attribute])


def fix_names(attribute, value):
    """Names the layers that an attribute holds after the attribute.

    Args:
        attribute: The attribute's name.
        value: What is assigned to it: a layer, or a list, tuple or dict of layers.
            Anything else is left alone.
    """
    attribute = attribute.lstrip("_")
    if isinstance(value, keras.layers.Layer):
        fix_name(value, attribute)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            fix_names(f"{attribute}_{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            fix_names(f"{attribute}_{key}", item)
