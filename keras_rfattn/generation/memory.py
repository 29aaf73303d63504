"""Counts the memory that generation needs, with states and with softmax attention."""

import math
from typing import NamedTuple

import keras
import numpy as np

from keras_rfattn.arguments import check_sizes
from keras_rfattn.generation.streaming import check, is_decoder, keys_and_values
from keras_rfattn.models.generation import decodes
from keras_rfattn.models.report import ADVISERS

LENGTH = 8192  # tokens for which reports count memory, where a model has no maximum


class StateBytes(NamedTuple):
    """Memory for generation in bytes.

    Attributes:
        state: Size of the arrays in the model's state.
        softmax_cache: Size of what all layers would keep with softmax attention: the
            keys and values of every token.
    """

    state: int
    softmax_cache: int


def state_bytes(model, length, batch_size=1):
    """Returns the memory of a model's generation state, and of a softmax cache.

    Args:
        model: A KerasHub `CausalLM` with linear attention.
        length: Number of tokens per row for which softmax layers reserve keys and
            values. The state of linear layers does not depend on it.
        batch_size: Number of rows.

    Returns:
        A `StateBytes`. Its `state` is the size of all arrays in the state that
        `prefill(model, tokens, max_length=length)` returns.
    """
    check_sizes(length=length, batch_size=batch_size)
    stream = check(model)
    state = stream.blank()
    per_token = sum(map(_size, keys_and_values(state)))
    layers = [x for x in stream.sites if decodes(x)]
    cached = sum(_cache_size(x) for x in layers)
    return StateBytes(
        batch_size * (_size(state) + (length - 1) * per_token),
        batch_size * length * cached,
    )


def _cache_size(site):
    """Returns the bytes of the keys and values of one token in an attention layer."""
    heads, head_dim = site.linear_class._kv_shape(site.layer)
    return 2 * heads * head_dim * _item_size(site.layer.compute_dtype)


def _size(state):
    """Returns the bytes of all arrays in a nested structure."""
    leaves = keras.tree.flatten(state)
    return sum(math.prod(x.shape) * _item_size(x.dtype) for x in leaves)


def _item_size(dtype):
    name = keras.backend.standardize_dtype(dtype)
    # NumPy alone has no bfloat16.
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def _advise(model):
    """Returns a line for `describe_attention` on the memory of a decoder."""
    if not is_decoder(model):
        return []
    length = getattr(model.backbone, "max_sequence_length", None) or LENGTH
    state, cache = (_megabytes(x) for x in state_bytes(model, length))
    return [f"generating {length} tokens: a state of {state}, softmax's cache {cache}"]


def _megabytes(size):
    return f"{size / 1e6:.3g} MB"


ADVISERS.append(_advise)
