"""The base of a set of maps: the weights of a model, recognized up to rounding.

A manifest holds a hash of all weights and a sketch of each: its norm and a few random
projections, from which its distance to another weight is estimated. Both are computed
from the weights that a model has at that moment, with its adapters (LoRA).
"""

import hashlib
import math

import numpy as np

import keras_rfattn.models.stable_names as stable_names
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.weights import as_numpy
from keras_rfattn.models.swap import original_class

PROJECTIONS = 16
# The largest distances, relative to the norm of a weight, that rounding explains: to 8
# bits for matrices, 16 bits for vectors (the table in docs/pages/guides/share.md).
LIMITS = {"attention": 0.015, "matrices": 0.06, "vectors": 0.005}
MATRICES = "kernel", "embeddings", "reverse_embeddings"
MERGED = 1e-3  # share of a limit that merging adapters in another order explains
ADAPTERS = "lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b"
OF_QUANTIZATION = "scale", "zero", "g_idx", "history"


def entry_of(model):
    """Returns the entry "base" of a manifest."""
    base = stable_names.base_of(model)
    owned = stable_names.owned_by_name(base, FeatureMap)
    return {
        "class": original_class(base).__name__,
        "weights": _hash(owned),
        "adapters": _adapters(owned),
        "limits": LIMITS,
        "sketch": {x: _sketch(*owned[x]) for x in owned if _is_own(x, *owned[x])},
    }


def distance(model, entry):
    """Returns the largest distance in units of what rounding explains, and text."""
    base = stable_names.base_of(model)
    owned = stable_names.owned_by_name(base, FeatureMap)
    own = [x for x in owned if _is_own(x, *owned[x])]
    # The first format has no sketch.
    saved = entry.get("sketch", dict.fromkeys(own))
    if original_class(base).__name__ != entry["class"] or {*saved} != {*own}:
        return math.inf, "of another class or with other weights"
    if _hash(owned) == entry["weights"]:
        return 0.0, ""
    share = 1.0 if _adapters(owned) == entry.get("adapters") else MERGED
    inside = tuple(f"{path}/" for path in stable_names.sites_by_name(base))

    def limit(name):
        kind = "attention" if name.startswith(inside) else "matrices"
        kind = kind if owned[name][0].name in MATRICES else "vectors"
        return share * entry.get("limits", LIMITS)[kind]

    found = {x: _relative(saved[x], _sketch(*owned[x])) for x in own}
    worst = max(own, key=lambda x: found[x] / limit(x))
    return found[worst] / limit(worst), f"{100 * found[worst]:.2g} % away ({worst})"


def _is_own(name, variable, layer):
    """Returns whether a weight is the checkpoint's own, in any precision."""
    is_quantized = getattr(layer, "quantization_mode", None) is not None
    return not name.endswith(ADAPTERS + OF_QUANTIZATION * is_quantized)


def _adapters(owned):
    """Returns the names of the adapters that have an effect."""
    second = [x for x in owned if x.endswith(ADAPTERS[1::2])]
    used = [x for x in second if np.any(as_numpy(owned[x][0].value))]
    return [x.removesuffix("_b") for x in used]


def _hash(owned):
    """Returns a hash of the values of weights, rounded to bfloat16."""
    import ml_dtypes

    digest, adapters = hashlib.sha256(), _adapters(owned)
    for name, (variable, _) in owned.items():
        if not name.endswith(ADAPTERS) or name[:-2] in adapters:
            array = as_numpy(variable.value).astype("float32")
            digest.update(repr(array.shape).encode())
            digest.update(array.astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()


def _value(variable, layer):
    """Returns a weight as its layer uses it: dequantized, with its adapter."""
    array, name = as_numpy(variable.value).astype("float32"), variable.name
    scale = getattr(layer, f"{name}_scale", None)
    if scale is not None and "int8" in str(variable.dtype):
        if hasattr(layer, "_adjust_scale_for_dequant"):
            scale = layer._adjust_scale_for_dequant(scale)
        scale = as_numpy(scale)
        array = array / (scale[:, None] if name == "embeddings" else scale)
    if getattr(layer, "lora_enabled", False) and hasattr(layer, f"lora_{name}_a"):
        first, second = (getattr(layer, f"lora_{name}_{end}") for end in "ab")
        added = as_numpy(first.value) @ as_numpy(second.value)
        array = array + layer.lora_alpha / layer.lora_rank * added
    return np.atleast_1d(array)


def _sketch(variable, layer):
    """Returns the norm of a weight and random projections of it, as text."""
    array = _value(variable, layer)
    rows = array.reshape(-1, array.shape[-1])
    # The entries of a projection are products of two drawn vectors.
    left, right = (
        np.random.Generator(np.random.Philox(seed)).normal(size=(count, PROJECTIONS))
        for seed, count in enumerate(rows.shape)
    )
    projections = np.sum(left * (rows @ right.astype("float32")), axis=0)
    return " ".join(f"{x:.6g}" for x in [np.linalg.norm(rows), *projections])


def _relative(saved, own):
    """Returns the estimated distance of two weights, relative to the first's norm."""
    if saved in (own, None):
        return 0.0 if saved else math.inf
    (norm, *saved), (_, *own) = (map(float, x.split()) for x in (saved, own))
    moved = math.dist(saved, own) / math.sqrt(PROJECTIONS)
    # Infinity for NaN too.
    return moved / norm if norm > 0 and moved >= 0 else math.inf
