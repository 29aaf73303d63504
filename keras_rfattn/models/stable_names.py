"""Stable names of the layers and weights of a model.

Keras numbers automatic layer names in order of creation, so that paths can differ
between two processes. The names here depend on the model alone: automatic names lose
their number, and equal names inside one parent are told apart by a suffix such as `#2`.
"""

import hashlib
import math
import re

import keras
import numpy as np
from keras.src.utils.naming import to_snake_case

from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.weights import as_numpy
from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class

# Name of the sublayer that is the feature map of an attention layer.
MAP = "feature_map"
# Names of the two weights of an adapter (LoRA), after that of their layer.
ADAPTERS = (
    ("/lora_kernel_a", "/lora_kernel_b"),
    ("/lora_embeddings_a", "/lora_embeddings_b"),
)


def base_of(model):
    """Returns the model that maps belong to: the backbone of a task, for instance."""
    sites = {id(site.layer) for site in survey(model)}
    models = [x for x in model._flatten_layers() if isinstance(x, keras.Model)]
    inner = {id(x): {id(y) for y in x._flatten_layers()} for x in models}
    around = [x for x in models if sites <= inner[id(x)]]
    return min(around, key=lambda x: len(inner[id(x)]), default=model)


def checkpoint_hash(model):
    """Returns `hash_of` all weights of a model's base, without its feature maps."""
    return hash_of(weights_by_name(base_of(model), FeatureMap))


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


def weights_by_name(root, skip=()):
    """Returns a dict from stable names to all weights in a layer."""
    found, seen = {}, set()
    for name, layer in layers_by_name(root, skip).items():
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            if id(variable) not in seen:
                seen.add(id(variable))
                own = _unique(f"{name}/{variable.name}".lstrip("/"), found)
                found[own] = variable
    return found


def hash_of(weights):
    """Returns a hash of the values of weights, which identifies a checkpoint."""
    digest, effective = hashlib.sha256(), adapters(weights)
    for name, variable in weights.items():
        if _is_adapter(name) and name not in effective:
            continue
        array = as_numpy(variable.value)
        digest.update(repr(array.shape).encode())
        digest.update(_as_bfloat16(array).tobytes())
    return digest.hexdigest()


def parameters_of(weights):
    """Returns the number of a checkpoint's own parameters, without adapters."""
    own = [x for name, x in weights.items() if not _is_adapter(name)]
    return sum(math.prod(x.shape) for x in own)


def _is_adapter(name):
    return name.endswith(sum(ADAPTERS, ()))


def adapters(weights):
    """Returns the names of the weights of all adapters (LoRA) that have an effect."""
    found = set()
    for first, second in ADAPTERS:
        owners = [x.removesuffix(second) for x in weights if x.endswith(second)]
        used = [x for x in owners if np.any(as_numpy(weights[x + second].value))]
        found |= {owner + end for owner in used for end in (first, second)}
    return found


def _as_bfloat16(array):
    """Rounds to bfloat16, to even in ties; returns the bits as uint16."""
    bits = np.atleast_1d(array).astype("float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


def _unique(name, taken):
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found
