"""Attention with a state of fixed size: prefill a context, then add token by token.

The state holds sums over tokens, not the tokens themselves, so its size does not depend
on the number of tokens. `causal(..., state=...)` continues from it in parallel. For a
single token, call `extend_state` and then `read_state`.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import representable
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    merge_sums,
    no_sums,
    normalize,
    read,
    summarize,
)


class State(NamedTuple):
    """Sums over past tokens, a pytree with the batch on axis 0.

    Attributes:
        maximum: Array of shape `(B, K, M)`, or `(B, K, 1)` for features that share one
            scale: the largest exponent so far of each feature, float32.
        numerator: Array of shape `(B, K, V, M)`: Σ v φ(k)ᵀ relative to `exp(maximum)`,
            float32.
        normalizer: Array of shape `(B, K, M)`: Σ φ(k) relative to `exp(maximum)`,
            float32.
        magnitude: Array in the shape of `maximum`: Σ exp(log_scale) relative to
            `exp(maximum)`, float32. The guard of signed maps needs it.
        position: Array of shape `(B,)`: number of visible tokens so far, int32.
    """

    maximum: Any
    numerator: Any
    normalizer: Any
    magnitude: Any
    position: Any


def init_state(batch_size, num_kv_heads, feature_dim, value_dim, scale_dim=None):
    """Returns the state before any token.

    Args:
        batch_size: Number of sequences B.
        num_kv_heads: Number of key/value heads K.
        feature_dim: Feature width M.
        value_dim: Value dim V.
        scale_dim: Size of the last axis of the features' `log_scale`: M (default), or 1
            for maps whose features share one scale.

    Returns:
        A `State`.
    """
    lead = batch_size, num_kv_heads
    sums = no_sums(lead, feature_dim, value_dim, scale_dim or feature_dim)
    return State(*sums, ops.zeros((batch_size,), dtype="int32"))


def extend_state(state, key_features, value, key_mask=None):
    """Returns the state with keys and values added.

    Args:
        state: A `State`.
        key_features: `Features` of shape `(B, S, K, M)`, for any S.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional array of shape `(B, S)`, true for visible keys.

    Returns:
        The extended `State`.
    """
    new = sum_tokens(key_features, value, key_mask)
    position = state.position + count_visible(value, key_mask)
    return to_state(merge_sums(to_sums(state), new), position)


def read_state(state, query_features, dtype=None):
    """Computes attention of queries to all tokens in a state.

    Args:
        state: A `State`.
        query_features: `Features` of shape `(B, T, N, M)`; every query sees the whole
            state.
        dtype: Compute dtype, float32 by default.

    Returns:
        Array of shape `(B, T, N, V)` in `dtype`.
    """
    num_kv_heads = state.numerator.shape[1]
    query = heads_first(query_features, num_kv_heads).relative().compute()
    dtype = dtype or "float32"
    products = "float32" if dtype == "float16" else dtype
    output = normalize(read(to_sums(state), query, products), query)
    num_heads = query_features.num_heads
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def sum_tokens(key_features, value, key_mask):
    """Returns the `Sums` of keys and values of the shapes that `extend_state` takes."""
    num_kv_heads, mask = value.shape[2], heads_mask(key_mask)
    value = split_heads(representable(value), num_kv_heads)
    return summarize(*admit(heads_first(key_features, num_kv_heads), value, mask), mask)


def to_sums(state):
    """Returns the `Sums` in a state."""
    return Sums(*state[:4])


def to_state(sums, position):
    """Returns sums as a `State`, in float32 for any compute dtype."""
    return State(*(ops.cast(x, "float32") for x in sums), position)


def count_visible(value, key_mask):
    """Returns how many of the values `(B, S, K, V)` are visible: `(B,)`, int32."""
    batch, length = ops.shape(value)[0], ops.shape(value)[1]
    if key_mask is None:
        return ops.broadcast_to(ops.cast(length, "int32"), (batch,))
    return ops.sum(ops.cast(key_mask, "int32"), axis=1)
