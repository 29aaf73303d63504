"""What a Keras attention mask means: key padding, causality, both, or refused."""

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from keras_rfattn.ops.precision import known_true
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sizes import repeated


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A mask whose meaning is known, in place of a dense `(B, T, S)` array.

    Not a pytree: Keras would otherwise refuse it as an argument that mixes tensors
    with plain values.

    Attributes:
        key_mask: `(B, S)` booleans, true for visible keys (`(1, S)` for every row of
            the batch), or `None` for all.
        query_mask: `(B, T)` booleans, false for queries whose row is 0, or `None`.
        causal: Whether query i sees keys `j <= i` only.
        self_attention: Whether queries and keys come from the same tokens, so that
            a statistic of the queries tells nothing of a future token.
        offset: Position of query 0 among the keys, when causal: query i then sees
            keys `j <= offset + i` (cached decoding).
        segment_ids: Integers `(B, T)` of self-attention over packed rows: tokens see
            those of their own text, that is of equal ids, alone. `None` for one text.
        prefix_mask: `(B, S)` booleans of causal self-attention: keys that queries
            before them see too (prefix-LM). `None` for none.
    """

    key_mask: Any = None
    query_mask: Any = None
    causal: bool = False
    self_attention: bool = False
    offset: Any = None
    segment_ids: Any = None
    prefix_mask: Any = None

    def replace(self, **changes):
        """A copy with some attributes changed."""
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
        mask: `None`, an `AttentionMask`, or an array (true or nonzero: visible) that
            broadcasts to `(B, T, S)` as in Keras: of shape `(B, 1, S)` or `(B, 1, 1,
            S)`; or, if its values are at hand and it is padding, causal or both,
            `(B, T, S)`, `(B, 1, T, S)` or `(T, S)`.
        query_length: T.
        key_length: S.
        causal: Whether attention is causal besides.

    Returns:
        An `AttentionMask`.

    Raises:
        ValueError: If the mask has another shape, is neither padding nor causal, nor
            both, or depends on the query and is being traced, so that its values
            cannot be looked at.
    """
    if isinstance(mask, AttentionMask):
        return mask.replace(causal=mask.causal or causal)
    if mask is None:
        return AttentionMask(causal=causal)
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
        mask = repeated(mask, key_length, axis=-1)
    if mask.shape[1] == 1:
        return AttentionMask(ops.cast(mask[:, 0], "bool"), causal=causal)
    return _decode_dense(mask, causal)


def _broadcasts(shape, lengths):
    """Whether a mask's shape is one of a mask `(B, T, S)` shared by the heads."""
    if len(shape) not in (2, 3) and not (len(shape) == 4 and shape[1] == 1):
        return False
    pairs = zip(shape[-2:], lengths, strict=True)
    return all(size in (1, None, length) or length is None for size, length in pairs)


def _decode_dense(mask, causal):
    try:
        values = ops.convert_to_numpy(mask).astype(bool)
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
    """A mask, `None` if it hides nothing and PyTorch can tell at once."""
    if key_mask is None or known_true(key_mask):
        return None
    return key_mask


def heads_mask(key_mask):
    """`(B, S)` padding mask as booleans that broadcast over `(B, K, S)`."""
    return None if key_mask is None else ops.expand_dims(ops.cast(key_mask, "bool"), 1)


def hide(array, mask):
    """Zeroes the hidden rows of `(..., S, ·)`; they may hold NaN."""
    return array if mask is None else where(ops.expand_dims(mask, -1), array, 0)
