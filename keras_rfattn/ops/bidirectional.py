"""Every query sees every key: one sum over the keys, one product per query."""

from keras import ops

from keras_rfattn.ops.features import Deferred
from keras_rfattn.ops.layout import heads_first
from keras_rfattn.ops.layout import merge_heads
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.precision import representable
from keras_rfattn.ops.sums import admit
from keras_rfattn.ops.sums import normalize
from keras_rfattn.ops.sums import read
from keras_rfattn.ops.sums import summarize


def bidirectional(query_features, key_features, value, key_mask=None):
    """Linear attention without causality, O((T + S) · M · V).

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Deferred`.
        key_features: The same of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, S)`, true for visible keys. Hidden
            keys and values may hold anything, NaN included.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no
        key is 0.
    """
    num_kv_heads, num_heads = value.shape[2], query_features.num_heads
    dtype, value = value.dtype, representable(value)
    mask, is_own = heads_mask(key_mask), _is_own(key_features)
    # One side after the other: half the memory, and the same for both.
    key = heads_first(key_features, num_kv_heads)
    key, value = admit(key, split_heads(value, num_kv_heads), mask)
    sums = summarize(key, value, mask, is_own)
    del key
    query, spoiled = heads_first(query_features, num_kv_heads, True)
    reading = read(sums, query, value.dtype, is_last=_is_own(query_features))
    spoiled = spoiled + sums.spoiled[..., None, None]
    output = normalize(reading, query) + spoiled
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def _is_own(features):
    """Whether their exponents are computed here, and held by nothing else."""
    return isinstance(features, Deferred) and features.is_exponential
