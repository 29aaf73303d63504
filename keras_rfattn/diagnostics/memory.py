"""Memory that generation keeps for a sequence, in caches of softmax and in states."""

import keras
import numpy as np

from keras_rfattn.feature_maps.arguments import is_number
from keras_rfattn.layers.checks import check_sizes
from keras_rfattn.layers.decoding import empty_state
from keras_rfattn.models.survey import survey


def softmax_layers_within(model, memory, length):
    """Counts the layers that can stay softmax within a share of the cache's memory.

    Softmax attention keeps the keys and values of all tokens, a linear layer a state
    whose size does not depend on the length. `Sensitivity.softmax_layers` names the
    layers, given their number.

    Args:
        model: A decoder with linear attention.
        memory: Memory of one sequence as a share of what all its layers would keep as
            softmax, above 0 and at most 1.
        length: Number of tokens of the sequence.

    Returns:
        An integer from 0 to the number of linear layers.

    Raises:
        ValueError: If `memory` is not above 0 and at most 1, `length` is not a positive
            integer, the model has no linear layer, or the states alone need more
            memory.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> model = keras_rfattn.models.transformer_pp(
        ...     attention="favorplus", vocabulary_size=20, num_layers=4, num_heads=2,
        ...     head_dim=8, num_features=16)
        >>> diagnostics.softmax_layers_within(model, memory=0.5, length=1024)
        1
    """
    if not is_number(memory) or not 0 < memory <= 1:
        raise ValueError(
            "`memory` must be a share above 0 and at most 1. Received: "
            f"memory={memory!r}. Use 0.25 for a quarter of the cache."
        )
    check_sizes(length=length)
    layers = [site.layer for site in survey(model) if site.is_linear]
    if not layers:
        raise ValueError(
            "`model` must have linear attention layers. Received: "
            f"{type(model).__name__} without any. Call `replace_attention` first."
        )
    caches = [_cache_bytes(x, length) for x in layers]
    states = [_state_bytes(x) for x in layers]
    left = memory * sum(caches) - sum(states)
    if left < 0:
        raise ValueError(
            "`memory` must be enough for the states of all layers. Received: "
            f"memory={memory:g} at length={length}, where the states alone need "
            f"{sum(states) / sum(caches):.3g}. Use a larger share, longer sequences or "
            "fewer features."
        )
    # Any layers may be chosen, so that the most expensive ones count.
    costs = sorted((c - s for c, s in zip(caches, states, strict=True)), reverse=True)
    return int(np.searchsorted(np.cumsum(costs), left, side="right"))


def _cache_bytes(layer, length):
    heads, head_dim = layer._kv_shape()
    width = head_dim + getattr(layer, "_value_dim", head_dim)
    return heads * width * length * _size(layer.compute_dtype)


def _state_bytes(layer):
    leaves = keras.tree.flatten(empty_state(layer, 1))
    arrays = [x for x in leaves if hasattr(x, "shape")]
    return sum(int(np.prod(x.shape)) * _size(x.dtype) for x in arrays)


def _size(dtype):
    """Returns the bytes of a number."""
    name = keras.backend.standardize_dtype(dtype)
    # NumPy alone has no bfloat16.
    return 2 if name == "bfloat16" else np.dtype(name).itemsize
