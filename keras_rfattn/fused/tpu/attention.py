"""Converts tokens to the arguments of the Pallas kernels, and outputs back."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from keras_rfattn.backend import representable
from keras_rfattn.fused.tpu.bidirectional import bidirectional
from keras_rfattn.fused.tpu.causal import causal
from keras_rfattn.fused.tpu.passes import Columns, Rows
from keras_rfattn.fused.tpu.windowed import windowed
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.windowed import from_first_visible

# Number of tokens in a block, and its divisor: rows of bfloat16 come in sixteens.
BLOCK_SIZE, ROWS = 256, 16


class Side(NamedTuple):
    """Queries or keys, all finite.

    Attributes:
        tokens: Scaled tokens of shape `(B, T, N, H)`; the features estimate
            `exp(q · k)` of them.
        exponents: `Exponents` of the features of the tokens, heads first.
    """

    tokens: Any
    exponents: Any

    def turned(self, turn):
        """Returns the side with its tokens rotated by a function."""
        num_heads = self.tokens.shape[2]

        def turned(x):
            x = turn(merge_heads(x, num_heads, self.tokens.shape[1]))
            return split_heads(x, self.exponents.vectors.shape[1])

        x, common = turned(self.exponents.x), turned(self.exponents.common)
        return Side(turn(self.tokens), self.exponents._replace(x=x, common=common))


def attention(query, key, value, key_mask=None, is_causal=False, options=None):
    """Computes linear attention by exponential features.

    Args:
        query: `Side` of T queries with N heads.
        key: `Side` of S keys with K heads.
        value: Array of shape `(B, S, K, V)`, finite; its dtype is the compute dtype.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.
        is_causal: Whether query i sees only keys `j <= i`.
        options: `ops.Options`. `window`, or else `block_size`, a multiple of 16 tokens
            (256 by default), is used.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    window, dtype = options.window, value.dtype
    if window is not None and key_mask is not None:
        # Windows are counted from the first visible key.
        turn, turn_back = from_first_visible(key_mask)
        query, key = query.turned(turn), key.turned(turn)
        value, seen = turn(value), turn(key_mask)
        output = turn_back(_attention(query, key, value, seen, is_causal, options))
        if is_causal:
            # Rows before the first visible key were rotated behind all keys.
            begun = jnp.cumsum(key_mask.astype("int32"), axis=1) > 0
            output = jnp.where(begun[:, :, None, None], output, 0)
    else:
        output = _attention(query, key, value, key_mask, is_causal, options)
    return output.astype(dtype)


def _attention(query, key, value, key_mask, is_causal, options):
    (length, num_heads), num_kv_heads = query.tokens.shape[1:3], value.shape[2]
    groups, mask = num_heads // num_kv_heads, heads_mask(key_mask)
    value = hide(split_heads(representable(value), num_kv_heads), mask)
    term = key.exponents.common
    if mask is not None:
        term = jnp.where(mask[..., None], term, LOWEST)
    tokens = [split_heads(side.tokens, num_kv_heads) for side in (query, key)]
    rows = [query.exponents.x, tokens[0], query.exponents.common]
    columns = [key.exponents.x, tokens[1], value, term]
    sides = query.exponents, key.exponents
    parameters = [x.vectors for x in sides] + [x.bias for x in sides]
    if options.window is not None:
        output = _in_windows(rows, columns, parameters, is_causal, options)
    else:
        size = BLOCK_SIZE if options.block_size is None else options.block_size
        longest = max(length, columns[0].shape[2])
        size = min(size, -(-longest // ROWS) * ROWS)
        # Keys added at the end are hidden, and the added queries are cut off again.
        row, (x, _, value, term) = _padded(rows[0], size * groups), columns
        columns = *(_padded(a, size) for a in (x, value)), _padded(term, size, LOWEST)
        algorithm = causal if is_causal else bidirectional
        output = algorithm(row, *columns, *parameters, size)
    return merge_heads(output[:, :, : length * groups], num_heads, length)


def _in_windows(rows, columns, parameters, is_causal, options):
    """Computes windows as blocks, padded with hidden tokens to a kernel's size."""
    size = min(options.window, columns[0].shape[2])
    whole, groups = -(-size // ROWS) * ROWS, rows[0].shape[2] // columns[0].shape[2]

    def filled(x, per_token=1, constant=0):
        x = _padded(x, size * per_token, constant)
        x = x.reshape(*x.shape[:2], -1, size * per_token, x.shape[-1])
        width = (whole - size) * per_token
        x = jnp.pad(x, (*[(0, 0)] * 3, (0, width), (0, 0)), constant_values=constant)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    rows = Rows(*(filled(x, groups) for x in rows))
    columns = Columns(*map(filled, columns[:3]), filled(columns[3], 1, LOWEST))
    found = windowed(rows, columns, parameters, whole, is_causal, options.sliding)
    found = found.reshape(*found.shape[:2], -1, whole * groups, found.shape[-1])
    found = found[:, :, :, : size * groups]
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


def _padded(x, size, constant=0):
    """Pads axis 2 at the end to whole blocks of `size`, at least one."""
    count = max(-(-x.shape[2] // size), 1) * size - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, count), (0, 0)), constant_values=constant)
