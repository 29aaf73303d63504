"""Every query sees every key: one sum over the keys, one product per query."""

from keras import ops

from keras_rfattn.ops import features as f


def bidirectional(query_features, key_features, value, key_mask=None):
    """Linear attention without causality, O((T + S) · M · V).

    Args:
        query_features: `Features` of shape `(B, T, N, M)`.
        key_features: `Features` of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, S)`, true for visible keys. Hidden
            keys and values may hold anything, NaN included.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no
        key is 0.
    """
    num_kv_heads, num_heads = value.shape[2], query_features.num_heads
    dtype, value = value.dtype, f.representable(value)
    query, spoiled = f.heads_first(query_features, num_kv_heads)
    key = f.heads_first(key_features, num_kv_heads)
    mask = f.heads_mask(key_mask)
    key, value = f.admit(key, f.split_heads(value, num_kv_heads), mask)
    sums = f.summarize(key, value, mask)
    shift = f.query_shift(query, sums.maximum)
    reading = f.read(sums, query, shift, value.dtype)
    spoiled = spoiled + sums.spoiled[..., None, None]
    output = f.normalize(reading, query) + spoiled
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(f.merge_heads(output, num_heads, length), dtype)
