"""Converts tokens to the arguments of the Pallas kernels, and outputs back."""

import jax.numpy as jnp

from keras_rfattn.backend import representable, wide_dtype
from keras_rfattn.experimental.tpu.bidirectional import bidirectional
from keras_rfattn.experimental.tpu.causal import causal
from keras_rfattn.experimental.tpu.passes import Columns, Rows
from keras_rfattn.experimental.tpu.windowed import windowed
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.windows import from_first_visible

# Number of tokens in a block, and its divisor: rows of bfloat16 come in sixteens.
BLOCK_SIZE, ROWS = 256, 16


def attention(features, value, local, key_mask, is_causal, options):
    """Computes linear attention by exponential features."""
    dtype, turn_back = value.dtype, None
    features = [x.of_tokens(lambda y: y.astype(wide_dtype(y))) for x in features]
    tokens = [x.x for x in features] if local is None else local[:2]
    if options.window is not None and key_mask is not None:
        # Windows are counted from the first visible key.
        turn, turn_back = from_first_visible(key_mask, is_causal)
        features = [x.of_tokens(turn) for x in features]
        *tokens, value, key_mask = map(turn, (*tokens, value, key_mask))
    (length, num_heads), num_kv_heads = tokens[0].shape[1:3], value.shape[2]
    groups, mask = num_heads // num_kv_heads, heads_mask(key_mask)
    value = hide(split_heads(representable(value), num_kv_heads), mask)
    query, key = (heads_first(x, num_kv_heads) for x in features)
    near_query, near_key = (split_heads(x, num_kv_heads) for x in tokens)
    term = key.hidden(mask).settled().common
    rows = Rows(query.x, near_query, query.settled().common)
    columns = Columns(key.x, near_key, value, term)
    parameters = query.matrix, key.matrix, query.bias, key.bias
    if options.window is not None:
        output = _in_windows(rows, columns, parameters, is_causal, options)
    else:
        size = BLOCK_SIZE if options.block_size is None else options.block_size
        longest = max(length, value.shape[2])
        size = min(size, -(-longest // ROWS) * ROWS)
        # Keys added at the end are hidden, and the added queries are cut off again.
        key, value = (_padded(x, size) for x in (key.x, value))
        columns = Columns(key, None, value, _padded(term, size, LOWEST))
        algorithm = causal if is_causal else bidirectional
        rows = Rows(_padded(query.x, size * groups))
        output = algorithm(rows, columns, parameters, size)
    output = merge_heads(output[:, :, : length * groups], num_heads, length)
    output = output if turn_back is None else turn_back(output)
    return output.astype(dtype)


def _in_windows(rows, columns, parameters, is_causal, options):
    """Computes windows as blocks, padded with hidden tokens to a kernel's size."""
    size = min(options.window, columns.key.shape[2])
    whole = -(-size // ROWS) * ROWS
    groups = rows.query.shape[2] // columns.key.shape[2]

    def filled(x, per_token=1, constant=0):
        x = _padded(x, size * per_token, constant)
        x = x.reshape(*x.shape[:2], -1, size * per_token, x.shape[-1])
        width = (whole - size) * per_token
        x = jnp.pad(x, (*[(0, 0)] * 3, (0, width), (0, 0)), constant_values=constant)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    rows = Rows(*(filled(x, groups) for x in rows[:3]))
    columns = Columns(*map(filled, columns[:3]), filled(columns.term, 1, LOWEST))
    found = windowed(rows, columns, parameters, whole, is_causal, options.sliding)
    found = found.reshape(*found.shape[:2], -1, whole * groups, found.shape[-1])
    found = found[:, :, :, : size * groups]
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


def _padded(x, size, constant=0):
    """Pads axis 2 at the end to whole blocks of `size`, at least one."""
    count = max(-(-x.shape[2] // size), 1) * size - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, count), (0, 0)), constant_values=constant)
