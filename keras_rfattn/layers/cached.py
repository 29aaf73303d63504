"""Calls with a cache of keys and values, for users who pass one themselves.

KerasHub's tasks do not need this, because they generate with states
(`keras_rfattn.models.generation`).
"""

from keras import ops


def among_keys(query, key, value, mask, window=None):
    """Rewrites causal attention to a cache as attention without an offset.

    Query i is at position `offset + i` of the cache and sees keys up to that position.

    Args:
        query: Queries of shape `(B, T, N, H)`.
        key: Keys of the cache, `(B, S, K, H)`. They include those of the queries.
        value: Values of the cache, `(B, S, K, V)`.
        mask: A causal `AttentionMask` with an offset.
        window: The `window` of the layer's options, or `None`.

    Returns:
        `(query, key, value, mask, function)`. The new mask has no offset and no query
        mask. The new attention is either causal with as many queries as keys, or has a
        single query that is not causal. `function` extracts the output of the given
        queries from the output of the new attention.
    """
    length, plain = ops.shape(query)[1], mask.replace(offset=None, query_mask=None)
    if isinstance(mask.offset, int) and mask.offset == 0:
        if mask.key_mask is not None:
            plain = plain.replace(key_mask=mask.key_mask[:, :length])
        return query, key[:, :length], value[:, :length], plain, _as_it_is
    start = ops.cast(mask.offset, "int32"), *(0, 0)
    if query.shape[1] == 1 and window is None:
        # For a single query, a key mask expresses causality.
        seen = (
            ops.expand_dims(ops.arange(ops.shape(key)[1], dtype="int32"), 0) <= start[0]
        )
        if mask.key_mask is not None:
            seen = seen & ops.cast(mask.key_mask, "bool")
        plain = plain.replace(key_mask=seen, causal=False, self_attention=False)
        return query, key, value, plain, _as_it_is
    shape = ops.shape(query)
    room = ops.zeros((shape[0], ops.shape(key)[1], *shape[2:]), dtype=query.dtype)
    query = ops.slice_update(room, (0, *start), query)

    def taken(output):
        return ops.slice(output, (0, *start), (*shape[:3], output.shape[-1]))

    return query, key, value, plain, taken


def _as_it_is(output):
    return output
