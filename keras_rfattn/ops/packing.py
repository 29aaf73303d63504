"""Packing: several texts in one row of the batch, none of which sees another.

Before attention each text is moved to a row of its own, and afterwards back to its
place. So sums, windows, statistics and positions within windows start anew with every
text, in every algorithm. Tokens are moved only by gathers; nothing is added across
texts.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, is_plain, take_tokens, where

# Lengths are rounded up to a multiple of this, to compile for fewer shapes.
STEP = 16


class Layout(NamedTuple):
    """The places of the tokens of packed rows, in rows of one text each."""

    tokens: Any  # (B, P · L), the place in the packed row of each token of each text
    real: Any  # (B, P · L), whether such a token exists
    slots: Any  # (B, T), the place of each token of the packed row among the P · L
    lost: Any  # (B, T), which tokens found no place
    texts: int  # P, texts per row
    length: Any  # L, tokens per text

    def unpack(self, x):
        """Moves each text to a row: `(B, T, ...)` to `(B · P, L, ...)`."""
        x = take_tokens(x, self.tokens)
        return ops.reshape(x, (-1, self.length, *x.shape[2:]))

    def pack(self, x):
        """Moves tokens back to packed rows; lost tokens become NaN."""
        shape = -1, self.texts * self.length, *x.shape[2:]
        x = take_tokens(ops.reshape(x, shape), self.slots)
        lost = ops.reshape(self.lost, (*ops.shape(self.lost), *(1,) * len(shape[2:])))
        return where(lost, float("nan"), x)


def layout(segment_ids, max_segments=None):
    """Returns the `Layout` of packed rows."""
    length = ops.shape(segment_ids)[1]
    order = ops.argsort(segment_ids, axis=1)
    back = ops.argsort(order, axis=1)
    found = take_tokens(segment_ids, order)
    begins = ops.cast(found[:, 1:] != found[:, :-1], "int32")
    rank = ops.cumsum(ops.pad(begins, ((0, 0), (1, 0))), axis=1)
    texts, most = _sizes(rank, length, max_segments)

    members = ops.expand_dims(rank, -1) == ops.arange(texts, dtype="int32")
    counts = ops.sum(ops.cast(members, "int32"), axis=1)
    starts = ops.cumsum(counts, axis=1) - counts
    places = ops.arange(most, dtype="int32")
    tokens = clip(ops.expand_dims(starts, -1) + places, high=length - 1)
    real = places < ops.expand_dims(counts, -1)

    def flat(x):
        return ops.reshape(x, (-1, texts * most))

    rank = take_tokens(rank, back)
    start = take_tokens(starts, clip(rank, high=texts - 1))
    place = ops.cast(back, "int32") - start
    lost = (rank >= texts) | (place >= most)
    slots = where(lost, 0, rank * most + place)
    tokens = take_tokens(ops.cast(order, "int32"), flat(tokens))
    return Layout(tokens, flat(real), slots, lost, texts, most)


def _sizes(rank, length, max_segments):
    """Returns `(P, L)`: the most texts per row, and the most tokens per text."""
    try:
        rank = ops.convert_to_numpy(rank) if is_plain(rank) else None
        texts = int(rank.max()) + 1
    except Exception:
        if max_segments is None:
            raise ValueError(
                "Inside a compiled function, or a functional model, attention with "
                "`segment_ids` must know how many texts a row has at most. Received: "
                "max_segments=None. Set it where the layer is made, or "
                "`replace_attention(..., max_segments=...)`."
            ) from None
        return max_segments, length
    if max_segments is not None and texts > max_segments:
        raise ValueError(
            "A row of `segment_ids` has more texts than `max_segments`. Received: "
            f"{texts} of them, max_segments={max_segments}."
        )
    longest = max(int((rank == i).sum(1).max()) for i in range(texts))
    longest = min(length, -(-longest // STEP) * STEP)
    return 1 << (texts - 1).bit_length(), longest


def by_text(attend, tokens, mask, max_segments, **arguments):
    """Computes attention of packed rows, separately for each text."""
    if not mask.self_attention or mask.offset is not None:
        raise ValueError(
            "`segment_ids` need self-attention over whole rows, where queries and keys "
            "are the same tokens. Received: segment_ids in cross-attention, or in "
            "decoding with a cache. Give each text a row of its own instead."
        )
    ids = ops.convert_to_tensor(mask.segment_ids)
    if tuple(ids.shape) != tuple(tokens[0].shape[:2]):
        raise ValueError(
            "`segment_ids` must have the shape (B, T) of the tokens, "
            f"{tuple(tokens[0].shape[:2])}. Received: shape {tuple(ids.shape)}."
        )
    texts = layout(ids, max_segments)
    # Slots without a token hold copies of tokens of other texts. They are neither keys
    # nor queries, or they would count in statistics.
    real = ops.reshape(texts.real, (-1, texts.length))

    def visible(x):
        x = ops.broadcast_to(ops.cast(x, "bool"), ops.shape(ids))
        return ops.logical_and(real, texts.unpack(x))

    key_mask = real if mask.key_mask is None else visible(mask.key_mask)
    query_mask = None if mask.query_mask is None else visible(mask.query_mask)
    mask = mask.replace(segment_ids=None, key_mask=key_mask, query_mask=query_mask)
    output = attend(*(texts.unpack(x) for x in tokens), mask=mask, **arguments)
    return texts.pack(output)
