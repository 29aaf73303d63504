"""The definition of linear attention, slow and simple: the reference for all tests."""

from keras import ops

from keras_rfattn.backend import wide_dtype


def quadratic(query_features, key_features, value, key_mask=None, causal=False):
    """Computes attention with weights `w_ij = φ_q(q_i) · φ_k(k_j)`, one by one.

        out_i = Σ_j w_ij v_j / D_i,   D_i = Σ_j w_ij   over the visible j

    All exponents of a row are shifted by the largest of them, which cancels. The guard
    of signed denominators and the 1 in the denominator of polynomial attention are
    those of `sums.guarded`. The computation holds `B · N · T · S · M` numbers.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`.
        key_features: `Features` of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional array of shape `(B, S)`, true for visible keys. Hidden keys
            and values may hold anything.
        causal: Whether query i sees only keys `j <= i`.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    value = ops.convert_to_tensor(value)
    query, key = query_features.dense(), key_features.dense()
    if key_mask is not None:
        seen = ops.expand_dims(ops.cast(key_mask, "bool"), (2, 3))
        key = key.of_tokens(lambda x: ops.where(seen, x, 0))
        value = ops.where(seen, value, 0)
    groups = query.log_scale.shape[2] // value.shape[2]
    dtype = wide_dtype(query.log_scale, value)

    def queries(x):  # (B, N, T, 1, ·)
        return ops.expand_dims(ops.cast(ops.transpose(x, (0, 2, 1, 3)), dtype), 3)

    def keys(x):  # (B, N, 1, S, ·)
        x = ops.repeat(ops.transpose(x, (0, 2, 1, 3)), groups, axis=1)
        return ops.expand_dims(ops.cast(x, dtype), 2)

    visible = ops.ones((query.log_scale.shape[1], value.shape[1]), dtype="bool")
    if causal:
        visible = ops.tril(visible)
    visible = ops.expand_dims(visible, (0, 1, -1))
    if key_mask is not None:
        key_mask = ops.expand_dims(ops.cast(key_mask, "bool"), (1, 2, -1))
        visible = ops.logical_and(visible, key_mask)

    # (B, N, T, S, M). Hidden exponents do not enter the maximum.
    exponent = queries(query.log_scale) + keys(key.log_scale)
    exponent = ops.where(visible, exponent, -1e30)
    shift = ops.max(ops.stop_gradient(exponent), axis=(-2, -1), keepdims=True)
    magnitude = ops.where(visible, ops.exp(exponent - shift), 0)
    signs = 1
    if query.values is not None:
        signs = queries(query.values) * keys(key.values)
    magnitude = magnitude + ops.zeros_like(magnitude * signs)
    weights = ops.sum(magnitude * signs, axis=-1, keepdims=True)  # (B, N, T, S, 1)

    # (B, N, T, 1)
    denominator = ops.sum(weights, axis=3)
    bound = ops.sum(magnitude, axis=(3, 4))[..., None]
    if query_features.is_signed:
        floor = 1e-6 * ops.stop_gradient(bound)
        sign = ops.where(denominator < 0, -1.0, 1.0)
        denominator = ops.cast(sign, dtype) * ops.maximum(ops.abs(denominator), floor)
    if query_features.has_offset:
        denominator = ops.maximum(denominator, 0)
        is_seen = ops.cast(bound > 0, dtype)
        denominator = denominator + is_seen * ops.exp(-is_seen * shift[..., 0])
    denominator = ops.where(bound > 0, denominator, 1)
    output = ops.sum(weights * keys(value), axis=3) / denominator
    return ops.cast(ops.transpose(output, (0, 2, 1, 3)), value.dtype)
