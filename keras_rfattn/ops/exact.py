"""Softmax attention itself: what estimates are compared with."""

from keras import ops

from keras_rfattn.ops import features as f
from keras_rfattn.ops.backend import accumulated_matmul
from keras_rfattn.ops.backend import precise_einsum


def softmax_attention(query, key, value, key_mask=None, causal=False):
    """`softmax(q · k) v` over the visible keys.

    Args:
        query: Scaled queries, `(B, T, N, H)`.
        key: Scaled keys, `(B, S, K, H)`.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional array of shape `(B, S)`, true for visible keys.
        causal: Whether query i sees keys `j <= i` only.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key
        is 0.
    """
    groups = query.shape[2] // key.shape[2]
    key = ops.repeat(key, groups, axis=2) if groups > 1 else key
    logits = precise_einsum("btnh,bsnh->bnts", query, key)
    visible = ops.ones((ops.shape(query)[1], ops.shape(key)[1]), dtype="bool")
    visible = ops.tril(visible)[None, None] if causal else visible[None, None]
    if key_mask is not None:
        visible = visible & ops.cast(key_mask, "bool")[:, None, None, :]
    logits = ops.where(visible, logits, f.LOWEST)
    weights = ops.where(visible, ops.softmax(logits, axis=-1), 0)
    heads = f.split_heads(value, value.shape[2])
    heads = ops.repeat(heads, groups, axis=1) if groups > 1 else heads
    output = accumulated_matmul(weights, ops.cast(heads, weights.dtype))
    return ops.cast(ops.transpose(output, (0, 2, 1, 3)), value.dtype)
