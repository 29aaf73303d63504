"""Every query sees every key: one sum over the keys, one product per query."""

from keras import ops

from keras_rfattn.ops import fused
from keras_rfattn.ops.features import Exponents
from keras_rfattn.ops.features import Marked
from keras_rfattn.ops.layout import heads_first
from keras_rfattn.ops.layout import merge_heads
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.loops import by_heads
from keras_rfattn.ops.loops import product
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
    query = heads_first(query_features, num_kv_heads, is_relative=True, is_lazy=True)
    key = heads_first(key_features, num_kv_heads, is_lazy=True)
    value = split_heads(value, num_kv_heads)
    shapes = value.shape, query.spoiled.shape
    sizes = [product(*x[::2][:2], key.features.width) for x in shapes]
    size = None if None in sizes else max(sizes)
    parts = query, key, value, heads_mask(key_mask)
    if fused.is_fused(query, key, value):
        output = _without_features(*parts)
    else:
        output = by_heads(_attend, parts, size)
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def _without_features(query, key, value, mask):
    """All heads of it by PyTorch's fused operation."""
    key, value = admit(key, value, mask)
    spoiled = ops.sum(key.spoiled, axis=-2, keepdims=True)
    return fused.attend(query.features, key.features, value) + (query.spoiled + spoiled)


def _attend(query, key, value, mask):
    """Some heads of it, `(B, K, R, V)`."""
    # What is computed here may be overwritten; one side after the other, in the memory
    # of one.
    are_own = [isinstance(x.features, Exponents) for x in (query, key)]
    key, value = admit(key, value, mask)
    key = Marked(key.features.compute(), key.spoiled)
    sums = summarize(key, value, mask, is_last=are_own[1])
    del key
    features = query.features.compute()
    reading = read(sums, features, value.dtype, is_last=are_own[0])
    spoiled = query.spoiled + sums.spoiled[..., None, None]
    return normalize(reading, features, spoiled, value.dtype)
