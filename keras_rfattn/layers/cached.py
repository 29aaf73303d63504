"""Calls with a cache of keys and values, for users who pass one themselves.

KerasHub's tasks do not need this, because they generate with states
(`keras_rfattn.models.generation`).
"""

from keras import ops


def among_keys(query, key, value, mask, window=None):
    """Rewrites attention to a cache as attention without an offset."""
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
