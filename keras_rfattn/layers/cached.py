"""Decoding with a cache of keys and values, for tasks that keep one."""

from keras import ops

from keras_rfattn.ops.masks import AttentionMask


def apply_offset(query, key, value, mask):
    """Cached decoding: query i, at position `offset + i`, sees keys up to itself.

    Returns:
        `(query, key, value, mask, function)`, the function that takes an output to that
        of the queries that were given.
    """
    length = ops.shape(query)[1]
    plain = mask.replace(offset=None)
    if isinstance(mask.offset, int) and mask.offset == 0:
        if mask.key_mask is not None:
            plain = plain.replace(key_mask=mask.key_mask[:, :length])
        return query, key[:, :length], value[:, :length], plain, _same
    positions = ops.arange(ops.shape(key)[1])
    if query.shape[1] == 1:
        past = ops.cast(positions, "int32") <= ops.cast(mask.offset, "int32")
        past = ops.broadcast_to(past[None], (ops.shape(key)[0], ops.shape(key)[1]))
        if mask.key_mask is not None:
            past = past & mask.key_mask
        # Still attention over a part of the tokens: `self_attention` stays False,
        # and no statistic of them is taken.
        plain = AttentionMask(key_mask=past, query_mask=mask.query_mask)
        return query, key, value, plain, _same
    # Among as many others as there are keys, each at its position.
    start = ops.cast(mask.offset, "int32"), *(0, 0)
    shape = ops.shape(query)
    room = ops.zeros((shape[0], ops.shape(key)[1], *shape[2:]), dtype=query.dtype)
    query = ops.slice_update(room, (0, *start), query)

    def taken(output):
        return ops.slice(output, (0, *start), (*shape[:3], output.shape[-1]))

    return query, key, value, plain, taken


def _same(output):
    return output
