"""A lone query among the keys of a cache, for tasks that keep one."""

from keras import ops

from keras_rfattn.ops.kernel_attention import finite_tokens
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.kernel_attention import spoiled
from keras_rfattn.ops.layout import heads_first
from keras_rfattn.ops.layout import merge_heads
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.precision import representable
from keras_rfattn.ops.sums import admit
from keras_rfattn.ops.sums import combine
from keras_rfattn.ops.sums import normalize
from keras_rfattn.ops.sums import read
from keras_rfattn.ops.sums import summarize


def mixed(query_features, key_features, value, key_mask, near, local):
    """One query a row; `near` keys exactly, the others by features.

    Args:
        query_features: `Features` of shape `(B, 1, N, M)`.
        key_features: `Features` of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Boolean array of shape `(B, S)`, true for visible keys.
        near: Boolean array of shape `(B, S)`.
        local: `Local`; its window is in `near`.

    Returns:
        Array of shape `(B, 1, N, V)` in the dtype of `value`.
    """
    num_kv_heads, num_heads = value.shape[2], query_features.num_heads
    dtype, value = value.dtype, representable(value)
    query, _ = heads_first(query_features, num_kv_heads)
    features = heads_first(key_features, num_kv_heads)
    tokens = [split_heads(x, num_kv_heads) for x in (local.query, local.key, value)]
    mask, groups = heads_mask(key_mask), num_heads // num_kv_heads
    far, close = heads_mask(key_mask & ~near), heads_mask(key_mask & near)
    sums = summarize(*admit(features, tokens[-1], far), far)
    reading = read(sums, query, value.dtype)
    exact = read_exactly(local.kernel, *finite_tokens(*tokens), close[..., None, :])
    output = normalize(combine(reading, exact), query)
    output = output + spoiled(*tokens, mask, groups, causal=False)
    return ops.cast(merge_heads(output, num_heads, 1), dtype)


def near_keys(key_mask, position, window, sliding):
    """Which keys share the window of the query at `position`: `(B, S)`."""
    first = ops.argmax(ops.cast(key_mask, "int32"), axis=1)
    first = ops.cast(first, "int32")[:, None]
    positions = ops.arange(ops.shape(key_mask)[1], dtype="int32")[None]
    own = (ops.cast(position, "int32") - first) // window
    return (positions - first) // window >= own - (1 if sliding else 0)
