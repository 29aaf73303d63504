"""Packing: several texts in a row of the batch, none of which sees another.

Each text gets a row of its own before attention and its place back after it, so that
sums, windows, statistics and positions within windows begin anew with every text, in
every algorithm. Tokens are moved by gathers alone; nothing is added across texts.
"""

from typing import Any
from typing import NamedTuple

from keras import ops

from keras_rfattn.ops.layout import take_tokens
from keras_rfattn.ops.plain import is_plain
from keras_rfattn.ops.precision import elementwise_min
from keras_rfattn.ops.precision import where

# Lengths are rounded up to a multiple, for fewer shapes to compile.
STEP = 16


class Layout(NamedTuple):
    """Where the tokens of packed rows go.

    Attributes:
        tokens: Position in its packed row of each token of each text, `(B, P · L)`.
        real: Which of those there are, `(B, P · L)`.
        slots: Position among them of each token of a packed row, `(B, T)`.
        lost: Which tokens found no place, `(B, T)`.
        texts: P, texts of a row.
        length: L, tokens of a text.
    """

    tokens: Any
    real: Any
    slots: Any
    lost: Any
    texts: int
    length: Any

    def unpack(self, x):
        """A row for each text: `(B, T, ...)` to `(B · P, L, ...)`."""
        x = take_tokens(x, self.tokens)
        return ops.reshape(x, (-1, self.length, *x.shape[2:]))

    def pack(self, x):
        """The way back; NaN for a token that was lost."""
        shape = -1, self.texts * self.length, *x.shape[2:]
        x = take_tokens(ops.reshape(x, shape), self.slots)
        lost = ops.reshape(self.lost, (*ops.shape(self.lost), *(1,) * len(shape[2:])))
        return where(lost, float("nan"), x)


def layout(segment_ids, max_segments=None):
    """The `Layout` of packed rows.

    Args:
        segment_ids: Integers `(B, T)`; tokens of a row with equal ones are a text.
        max_segments: How many texts a row has at most. Needed where the values of
            `segment_ids` are not at hand, inside a compiled function: each row then
            takes the room of that many texts of T tokens.

    Returns:
        A `Layout`.

    Raises:
        ValueError: If a row has more texts than `max_segments`, or that is needed and
            not given.
    """
    length = ops.shape(segment_ids)[1]
    order = ops.argsort(segment_ids, axis=1)
    back = ops.argsort(order, axis=1)
    found = take_tokens(segment_ids, order)
    begins = ops.cast(found[:, 1:] != found[:, :-1], "int32")
    rank = ops.cumsum(ops.pad(begins, ((0, 0), (1, 0))), axis=1)
    texts, most = _sizes(rank, length, max_segments)

    members = ops.cast(
        ops.expand_dims(rank, -1) == ops.arange(texts, dtype="int32"), "int32"
    )
    counts = ops.sum(members, axis=1)
    starts = ops.cumsum(counts, axis=1) - counts
    places = ops.arange(most, dtype="int32")
    tokens = elementwise_min(ops.expand_dims(starts, -1) + places, length - 1)
    real = places < ops.expand_dims(counts, -1)

    def flat(x):
        return ops.reshape(x, (-1, texts * most))

    rank = take_tokens(rank, back)
    start = take_tokens(starts, elementwise_min(rank, texts - 1))
    place = ops.cast(back, "int32") - start
    lost = (rank >= texts) | (place >= most)
    slots = where(lost, 0, rank * most + place)
    tokens = take_tokens(ops.cast(order, "int32"), flat(tokens))
    return Layout(tokens, flat(real), slots, lost, texts, most)


def _sizes(rank, length, max_segments):
    """`(P, L)`: how many texts a row has, and tokens a text, at most."""
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
    """Attention of packed rows: each text by itself.

    Args:
        attend: `(query, key, value, mask=, **arguments) -> output`.
        tokens: Queries, keys and values, `(B, T, ·, ·)`.
        mask: `AttentionMask` with `segment_ids`.
        max_segments: The most texts of a row, see `layout`.
        **arguments: Further arguments of `attend`.

    Returns:
        `(B, T, ·, ·)`.

    Raises:
        ValueError: If queries and keys are not the same tokens of whole rows, or
            for the reasons of `layout`.
    """
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
    # Slots without a token hold copies of other texts' tokens: neither a key nor a
    # query, which would count in statistics.
    real = ops.reshape(texts.real, (-1, texts.length))

    def visible(x):
        x = ops.broadcast_to(ops.cast(x, "bool"), ops.shape(ids))
        return ops.logical_and(real, texts.unpack(x))

    key_mask = real if mask.key_mask is None else visible(mask.key_mask)
    query_mask = None if mask.query_mask is None else visible(mask.query_mask)
    mask = mask.replace(segment_ids=None, key_mask=key_mask, query_mask=query_mask)
    output = attend(*(texts.unpack(x) for x in tokens), mask=mask, **arguments)
    return texts.pack(output)
