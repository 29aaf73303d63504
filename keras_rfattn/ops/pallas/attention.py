"""From tokens to what the kernels take, and back."""

import jax.numpy as jnp

from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import merge_heads
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.masks import hide
from keras_rfattn.ops.not_finite import finite_values
from keras_rfattn.ops.not_finite import onward
from keras_rfattn.ops.not_finite import spoils
from keras_rfattn.ops.pallas.bidirectional import bidirectional
from keras_rfattn.ops.pallas.causal import causal
from keras_rfattn.ops.precision import representable

# Tokens of a block, and what divides it: rows of bfloat16 come in sixteens.
BLOCK_SIZE, ROWS = 256, 16


def attention(query, key, term, value, spoiled, key_mask=None, is_causal=False,
              block_size=None):  # fmt: skip
    """Linear attention by exponential features.

    Args:
        query: `Exponents` of finite tokens `(B, T, N, H)`.
        key: `Exponents` of finite tokens `(B, S, K, H)`.
        term: `(B, S, K, 1)`, what all exponents of a key have besides.
        value: `(B, S, K, V)`; its dtype is the compute dtype.
        spoiled: `(B, T, N, 1)` and `(B, S, K, 1)`: NaN for queries and keys that were
            not finite, else 0.
        key_mask: Optional `(B, S)`, true for visible keys.
        is_causal: Whether query i sees keys `j <= i` only.
        block_size: Tokens of a block, a multiple of 16; 256 if `None`.

    Returns:
        `(B, T, N, V)` in the dtype of `value`; a row that sees no key is 0.
    """
    (length, num_heads), num_kv_heads = query.x.shape[1:3], value.shape[2]
    groups, dtype, mask = num_heads // num_kv_heads, value.dtype, heads_mask(key_mask)
    value = hide(split_heads(representable(value), num_kv_heads), mask)
    query_spoiled, key_spoiled = (split_heads(x, num_kv_heads) for x in spoiled)
    key_spoiled = hide(key_spoiled, mask) + spoils(value)
    term = split_heads(term, num_kv_heads)
    if mask is not None:
        term = jnp.where(mask[..., None], term, LOWEST)
    tokens = split_heads(query.x, num_kv_heads), split_heads(key.x, num_kv_heads)
    size = BLOCK_SIZE if block_size is None else block_size
    size = min(size, -(-max(length, key.x.shape[1]) // ROWS) * ROWS)
    # What is added at the end is hidden, and queries of it are cut off again.
    rows = _padded(tokens[0], size * groups, 0)
    columns = [_padded(x, size, 0) for x in (tokens[1], finite_values(value))]
    algorithm = causal if is_causal else bidirectional
    output = algorithm(
        rows, *columns, _padded(term, size, LOWEST), query.vectors, key.vectors,
        query.bias, key.bias, size,
    )  # fmt: skip
    if is_causal:
        seen = jnp.repeat(onward(key_spoiled), groups, axis=2)
    else:
        seen = jnp.sum(key_spoiled, axis=2, keepdims=True)
    output = output[:, :, : length * groups] + query_spoiled + seen
    return merge_heads(output, num_heads, length).astype(dtype)


def _padded(x, size, constant):
    """Rows at the end, up to whole blocks of `size`; at least one."""
    count = max(-(-x.shape[2] // size), 1) * size - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, count), (0, 0)), constant_values=constant)
