"""Decoding with a cache of keys and values, for tasks that keep one."""

from keras import ops

from keras_rfattn.ops.masks import AttentionMask


def apply_offset(query, key, value, mask):
    """Cached decoding: query i, at position `offset + i`, sees keys up to itself."""
    length = ops.shape(query)[1]
    plain = mask.replace(offset=None)
    if isinstance(mask.offset, int) and mask.offset == 0:
        if mask.key_mask is not None:
            plain = plain.replace(key_mask=mask.key_mask[:, :length])
        return query, key[:, :length], value[:, :length], plain
    positions = ops.arange(ops.shape(key)[1])
    if query.shape[1] == 1:
        past = ops.cast(positions, "int32") <= ops.cast(mask.offset, "int32")
        past = ops.broadcast_to(past[None], (ops.shape(key)[0], ops.shape(key)[1]))
        if mask.key_mask is not None:
            past = past & mask.key_mask
        # Still attention over a part of the tokens: `self_attention` stays False,
        # and no statistic of them is taken.
        plain = AttentionMask(key_mask=past, query_mask=mask.query_mask)
        return query, key, value, plain
    raise ValueError(
        "Cached decoding takes one token at a time after the prompt. Received: "
        f"{length} queries at cache index {mask.offset}. Use a sampler that feeds "
        "one token per step."
    )
