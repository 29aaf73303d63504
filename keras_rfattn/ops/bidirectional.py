"""Bidirectional attention: one sum over the keys, then one product per query."""

from keras import ops

from keras_rfattn.backend import by_heads, product, representable
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.sums import admit, normalize, read, summarize


def bidirectional(query_features, key_features, value, key_mask=None):
    """Computes linear attention without causality in O((T + S) · M · V).

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Exponents` of that
            width.
        key_features: `Features` or `Exponents` of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, S)`, true for visible keys. Hidden keys
            and values may hold anything.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    num_kv_heads, num_heads = value.shape[2], query_features.num_heads
    groups, dtype = num_heads // num_kv_heads, value.dtype
    query, key = (heads_first(x, num_kv_heads) for x in (query_features, key_features))
    value = split_heads(representable(value), num_kv_heads)
    size = product(value.shape[0], value.shape[2], groups, key.width)
    output = by_heads(_attend, (query, key, value, heads_mask(key_mask)), size)
    length = ops.shape(output)[2] // groups
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def _attend(query, key, value, mask):
    """Computes some heads: the output has shape `(B, K, R, V)`."""
    # Keys are done before queries start, so that memory holds the features of one side
    # at a time.
    sums = summarize(*admit(key, value, mask), mask)
    return normalize(read(sums, query.relative(), value.dtype), query, value.dtype)
