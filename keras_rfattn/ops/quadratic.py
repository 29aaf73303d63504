"""The definition of linear attention, slow and simple: the reference for all tests."""

from keras import ops

from keras_rfattn.backend.precision import (
    accumulated_matmul,
    largest_of,
    repeat_each,
    wide_dtype,
)
from keras_rfattn.ops.features import LOWEST, finite
from keras_rfattn.ops.not_finite import mark, values_apart
from keras_rfattn.ops.sums import Reading, normalize


def quadratic(query_features, key_features, value, key_mask=None, causal=False):
    """Computes attention with weights `w_ij = φ_q(q_i) · φ_k(k_j)`, one by one.

        out_i = Σ_j w_ij v_j / D_i,   D_i = Σ_j w_ij   over the visible j

    All exponents of a row are shifted by the largest of them, which cancels. A row that
    sees a query, key or value which is not finite is NaN. The computation holds
    `B · N · T · S · M` numbers.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`.
        key_features: `Features` of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional array of shape `(B, S)`, true for visible keys.
        causal: Whether query i sees only keys `j <= i`.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`.
    """
    num_heads, num_kv_heads = query_features.log_scale.shape[2], value.shape[2]
    value = ops.convert_to_tensor(value)
    dtype = wide_dtype(query_features.log_scale, value)

    def per_query_head(x):
        return repeat_each(x, num_heads // num_kv_heads, axis=2)

    def aligned(x, axis):
        return ops.expand_dims(ops.transpose(x, (0, 2, 1, 3)), axis)

    query, key = (mark(x) for x in (query_features, key_features))
    value, spoiled = values_apart(value)
    spoiled = key.spoiled + ops.cast(spoiled, key.spoiled.dtype)
    query_spoiled, query, key = (
        query.spoiled,
        *(finite(x.features).dense() for x in (query, key)),
    )
    length, key_length = query.log_scale.shape[1], value.shape[1]
    visible = ops.ones((length, key_length), dtype="bool")
    if causal:
        visible = ops.tril(visible)
    visible = ops.expand_dims(visible, (0, 1))
    if key_mask is not None:
        visible = visible & ops.expand_dims(ops.cast(key_mask, "bool"), (1, 2))
    # (B, N, T, S), then summed over the keys that a row sees.
    spoiled = aligned(per_query_head(spoiled), 2)[..., 0]
    spoiled = ops.expand_dims(ops.sum(ops.where(visible, spoiled, 0), axis=-1), -1)
    spoiled = spoiled + ops.transpose(query_spoiled, (0, 2, 1, 3))

    # (B, N, T, S, M)
    exponent = aligned(query.log_scale, 3) + aligned(per_query_head(key.log_scale), 2)
    exponent = ops.where(ops.expand_dims(visible, -1), exponent, LOWEST)
    shift = largest_of(exponent, axis=(-2, -1), keepdims=True)
    magnitude = ops.exp(exponent - ops.stop_gradient(shift))
    weights = magnitude
    if query.is_signed:
        signs = aligned(query.values, 3) * aligned(per_query_head(key.values), 2)
        magnitude = magnitude + ops.zeros_like(signs)
        weights = magnitude * ops.cast(signs, magnitude.dtype)
    weights = ops.where(visible, ops.sum(weights, axis=-1), 0)
    bound = ops.where(visible, ops.sum(magnitude, axis=-1), 0)

    heads = ops.transpose(per_query_head(value), (0, 2, 1, 3))
    numerator = accumulated_matmul(weights, ops.cast(heads, dtype))
    reading = Reading(
        ops.stop_gradient(shift)[..., 0, 0],
        numerator,
        ops.sum(weights, axis=-1),
        ops.sum(bound, axis=-1),
    )
    output = normalize(reading, query_features) + spoiled
    return ops.cast(ops.transpose(output, (0, 2, 1, 3)), value.dtype)
