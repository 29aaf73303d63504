"""Keras attention masks: key padding, causality or both; any other is refused."""

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from keras_rfattn.backend import is_plain, known_true, where


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A mask whose meaning is known, in place of a dense `(B, T, S)` array.

    It is not a pytree, because Keras refuses a pytree argument that mixes tensors with
    plain values.

    Attributes:
        key_mask: `(B, S)` booleans, true for visible keys (`(1, S)` for every row of
            the batch), or `None` if all keys are visible.
        query_mask: `(B, T)` booleans, false for queries whose output is 0, or `None`.
        causal: Whether query i sees only keys `j <= i`.
        self_attention: Whether queries and keys come from the same tokens. Then a
            statistic of the queries reveals nothing about a future token. `None` if
            that is not known, which raises where it matters.
        offset: Position of query 0 among the keys, for causal attention: query i sees
            keys `j <= offset + i` (decoding with a cache). `None` for 0.
        segment_ids: `(B, T)` integers for self-attention over packed rows: a token sees
            only the tokens of its own text, which have the same id. `None` for one text
            per row.
        prefix_mask: `(B, S)` booleans for causal self-attention: keys that earlier
            queries see too (prefix-LM). `None` for none.
    """

    key_mask: Any = None
    query_mask: Any = None
    causal: bool = False
    self_attention: bool | None = False
    offset: Any = None
    segment_ids: Any = None
    prefix_mask: Any = None

    def replace(self, **changes):
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


REMEDY = (
    "Linear attention takes key padding (`(B, S)` as `key_mask` or `value_mask`, `(B, "
    "1, S)` as `attention_mask`) and causality (`use_causal_mask=True`); it cannot "
    "apply any other mask. Keep this layer softmax (`exclude=`), or pass those two "
    "instead."
)


def interpret_mask(mask, query_length, key_length, causal=False):
    """Turns a Keras attention mask into an `AttentionMask`.

    Args:
        mask: `None`, an `AttentionMask`, or an array in which true or nonzero means
            visible and which broadcasts to `(B, T, S)` as in Keras. Its shape is
            `(B, 1, S)` or `(B, 1, 1, S)`. If its values are known and it is padding,
            causal or both, it may also be `(B, T, S)`, `(B, 1, T, S)` or `(T, S)`.
        query_length: T, number of queries.
        key_length: S, number of keys.
        causal: Whether attention is causal in addition to the mask.

    Returns:
        An `AttentionMask`.

    Raises:
        TypeError: If the mask is not an array.
        ValueError: If the mask has another shape, is neither padding nor causal nor
            both, or depends on the query while being traced, so that its values are
            unknown.
    """
    if isinstance(mask, AttentionMask):
        return mask.replace(causal=mask.causal or causal)
    if mask is None:
        return AttentionMask(causal=causal)
    if not hasattr(mask, "shape"):
        raise TypeError(
            "`attention_mask` must be an array of booleans. Received: "
            f"attention_mask={mask!r:.80} of type {type(mask).__name__}. {REMEDY}"
        )
    shape = tuple(mask.shape)
    lengths = query_length, key_length
    if not _broadcasts(shape, lengths):
        raise ValueError(
            "`attention_mask` must have shape (T, S), (B, 1, S) or (B, T, S), with T = "
            f"{query_length} queries and S = {key_length} keys. "
            f"Received: attention_mask.shape={shape}. {REMEDY}"
        )
    if len(shape) == 4:
        mask = ops.squeeze(mask, axis=1)
    elif len(shape) == 2:
        mask = ops.expand_dims(mask, 0)
    if shape[-1] == 1 and key_length not in (1, None):
        mask = ops.repeat(mask, key_length, axis=-1)
    if mask.shape[1] == 1:
        return AttentionMask(ops.cast(mask[:, 0], "bool"), causal=causal)
    return _decode_dense(mask, causal)


def check_lengths(mask, query_length, key_length):
    """Raises `ValueError` unless padding masks have a column for each token."""
    for name, length in (("query_mask", query_length), ("key_mask", key_length)):
        if getattr(mask, name) is None:
            continue
        shape = tuple(getattr(mask, name).shape)
        # Lengths that are not known yet may have any value.
        is_open = not all(isinstance(n, int) for n in (*shape[1:], length))
        if len(shape) != 2 or not (is_open or shape[1] in (1, length)):
            raise ValueError(
                f"`{name}` must have shape (B, {length}), a column for each token. "
                f"Received: {name}.shape={shape}."
            )


def check_prefix(mask, options):
    """Raises `ValueError` if the mask has a prefix and something excludes a prefix."""
    asked = {
        "window": options.window is not None,
        "segment_ids": mask.segment_ids is not None,
        "offset": mask.offset is not None,
        "implementation": options.asks_for_kernels,
    }
    asked = sorted(k for k, x in asked.items() if x)
    if mask.prefix_mask is not None and (asked or not mask.causal):
        raise ValueError(
            "A prefix that all queries see (`prefix_mask`, prefix-LM) needs causal "
            "attention, by features alone and computed by XLA. Received: "
            f"causal={mask.causal}, and also {asked}. Leave these out."
        )


def _broadcasts(shape, lengths):
    """Returns whether a shape can be that of a mask `(B, T, S)` shared by the heads."""
    if len(shape) not in (2, 3) and not (len(shape) == 4 and shape[1] == 1):
        return False
    pairs = zip(shape[-2:], lengths, strict=True)
    return all(size in (1, None, length) or length is None for size, length in pairs)


def _decode_dense(mask, causal):
    try:
        values = ops.convert_to_numpy(mask).astype(bool) if is_plain(mask) else None
    except Exception:
        values = None
    if values is None or not isinstance(values, np.ndarray):
        raise ValueError(
            "`attention_mask` of shape (B, T, S) depends on the query, and its "
            "values cannot be examined inside a compiled function. "
            f"Received: attention_mask.shape={tuple(mask.shape)}. {REMEDY}"
        )
    lower = np.tril(np.ones(values.shape[1:], dtype=bool))
    visible = values.any(axis=1, keepdims=True)
    if np.array_equal(values, np.broadcast_to(visible, values.shape)):
        pass
    elif values.shape[1] == values.shape[2] and np.array_equal(values, visible & lower):
        causal = True
    else:
        raise ValueError(
            "`attention_mask` is neither key padding nor causal, nor both. "
            f"Received: attention_mask.shape={tuple(mask.shape)}. {REMEDY}"
        )
    return AttentionMask(ops.convert_to_tensor(visible[:, 0]), causal=causal)


def needed(key_mask):
    """Returns the mask, or `None` if it hides nothing and that is cheap to know."""
    if key_mask is None or known_true(key_mask):
        return None
    return key_mask


def first_visible(key_mask):
    """Returns the position `(B, 1)` of a row's first visible key; T if it has none."""
    hidden = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) == 0
    return ops.sum(ops.cast(hidden, "int32"), axis=1, keepdims=True)


def heads_mask(key_mask):
    """Returns a padding mask `(B, S)` as booleans that broadcast to `(B, K, S)`."""
    return None if key_mask is None else ops.expand_dims(ops.cast(key_mask, "bool"), 1)


def hide(array, mask):
    """Sets the hidden rows of `(..., S, ·)`, which may hold NaN, to 0."""
    return array if mask is None else where(ops.expand_dims(mask, -1), array, 0)
