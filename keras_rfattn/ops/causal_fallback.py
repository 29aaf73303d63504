"""Causal attention inside a block without any bound on the exponents.

Used by `causal` for the rows that its factored product cannot represent.

A block is cut into chunks of about the square root of its length. The keys of earlier
chunks are taken relative to their maximum per feature, which every query of the chunk
may know, so that a query's largest term is 1 and its sum cannot underflow. The keys of
the query's own chunk are weighed one by one, each pair relative to its own maximum.
"""

from keras import ops

from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.features import masked_log_scale
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import elementwise_max
from keras_rfattn.ops.precision import largest_of
from keras_rfattn.ops.precision import repeat_each
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sums import Reading
from keras_rfattn.ops.sums import query_shift


def unbounded_weights(query, key, mask, groups, dtype):
    """Weights of every query for the keys of its block that are not after it.

    Args:
        query: `Features` of shape `(B, K, n, C · G, M)`, groups beside their token.
        key: `Features` of shape `(B, K, n, C, M)`.
        mask: Booleans that broadcast to `(B, K, n, C)`, true for visible keys, or
            `None` if all are.
        groups: G, query heads per key head.
        dtype: Compute dtype of the products.

    Returns:
        `(weights, shift)`: a tuple of the weights, and for signed features of their
        magnitudes too, each `(B, K, n, C · G, C)` relative to `exp(shift)`; and the
        shift, `(B, K, n, C · G)`.
    """
    # `torch.jit.trace` records sizes as scalar tensors.
    size = int(key.log_scale.shape[-2])
    chunk = _chunk_length(size)
    count = -(-size // chunk)
    padding = count * chunk - size
    query = map_features(lambda x: _pad_rows(x, padding * groups), query)
    key = map_features(lambda x: _pad_rows(x, padding), key)
    if mask is not None:
        mask = _pad_rows(ops.expand_dims(mask, -1), padding)[..., 0]
    key = Features(key.values, masked_log_scale(key, mask))

    def cut(x, *inner):
        return ops.reshape(x, (*ops.shape(x)[:3], count, *inner, x.shape[-1]))

    query = map_features(lambda x: cut(x, chunk * groups), query)
    number = ops.arange(count)
    is_earlier = repeat_each(number, chunk)[None, :] < number[:, None]
    far, far_shift = _earlier_chunks(query, key, is_earlier[:, None], dtype)
    own, own_shift = _own_chunk(query, map_features(lambda x: cut(x, chunk), key))

    shift = elementwise_max(far_shift, own_shift)
    far_factor = ops.expand_dims(ops.exp(far_shift - shift), -1)
    own_factor = ops.expand_dims(ops.exp(own_shift - shift), -1)
    is_own = repeat_each(number, chunk)[None, :] == number[:, None]

    def joined(far, own):
        own = ops.tile(own * own_factor, (1,) * (len(own.shape) - 1) + (count,))
        found = far * far_factor + where(is_own[:, None], own, 0)
        return ops.reshape(found, (*ops.shape(found)[:3], -1, count * chunk))

    rows = size * groups
    weights = (joined(*x)[..., :rows, :size] for x in zip(far, own, strict=True))
    shift = ops.reshape(shift, (*ops.shape(shift)[:3], -1))[..., :rows]
    return tuple(weights), shift


def _chunk_length(size):
    """The power of two next above the square root of a block's length."""
    chunk = 1
    while chunk * chunk < size:
        chunk *= 2
    return chunk


def _earlier_chunks(query, key, is_earlier, dtype):
    """Weights `(..., n, c · G, n · c)` for keys of earlier chunks, and their shift."""
    log_scale = ops.expand_dims(key.log_scale, 3)
    log_scale = where(is_earlier[:, 0, :, None], log_scale, LOWEST)
    maximum = ops.stop_gradient(largest_of(log_scale, axis=-2))
    shift = query_shift(query, maximum)
    maximum = ops.expand_dims(maximum, -2)
    query = Features(query.values, query.log_scale + maximum)
    values = None if key.values is None else ops.expand_dims(key.values, 3)
    rows = query.expand(ops.expand_dims(shift, -1), dtype, query.is_exponential)
    weights = weigh_keys(query, rows, Features(values, log_scale - maximum), shift)
    return tuple(where(is_earlier, x, 0) for x in weights), shift


def _own_chunk(query, key):
    """Weights `(..., n, c · G, c)` for keys of the query's chunk, and their shift."""
    rows, columns = (int(x.log_scale.shape[-2]) for x in (query, key))
    token = repeat_each(ops.arange(columns), rows // columns)
    visible = (token[:, None] >= ops.arange(columns)[None, :])[..., None]
    exponent = ops.expand_dims(query.log_scale, -2) + ops.expand_dims(key.log_scale, -3)
    exponent = where(visible, exponent, 2 * LOWEST)
    shift = ops.stop_gradient(largest_of(exponent, axis=(-2, -1)))
    magnitudes = where(visible, ops.exp(exponent - ops.expand_dims(shift, (-2, -1))), 0)
    if query.is_exponential:
        return (ops.sum(magnitudes, axis=-1),), shift
    values = (ops.cast(x.values, magnitudes.dtype) for x in (query, key))
    products = [ops.expand_dims(x, a) for x, a in zip(values, (-2, -3), strict=True)]
    products = products[0] * products[1] * magnitudes
    return tuple(ops.sum(x, axis=-1) for x in (products, magnitudes)), shift


def weigh_keys(query, rows, key, shift):
    """`(weights, magnitudes)`, each `(..., R, S)`, of every query for every key.

    Args:
        query: `Features` of shape `(..., R, M)`.
        rows: The same, expanded relative to `shift`.
        key: `Features` of shape `(..., S, M)`, which nothing else holds.
        shift: Array of shape `(..., R)`.
    """
    columns = key.expand(None, rows.dtype, key.is_exponential)
    weights = accumulated_matmul(rows, columns, transpose_b=True)
    if query.is_exponential:
        return (weights,)
    rows = query.magnitudes(ops.expand_dims(shift, -1), rows.dtype)
    columns = ops.cast(ops.exp(key.log_scale), rows.dtype)
    return weights, accumulated_matmul(rows, columns, transpose_b=True)


def weigh_values(weights, mask, value, shift):
    """The reading that weights `(..., R, S)` make of values `(..., S, V)`."""
    if mask is not None:
        weights = tuple(where(ops.expand_dims(mask, -2), w, 0) for w in weights)
    # Numerator and denominator from the same rounded weights.
    rounded = ops.cast(weights[0], value.dtype)
    numerator = accumulated_matmul(rounded, value)
    denominator = ops.sum(ops.cast(rounded, numerator.dtype), axis=-1)
    bound = ops.sum(weights[1], axis=-1) if len(weights) > 1 else denominator
    return Reading(shift, numerator, denominator, bound)


def _pad_rows(x, count):
    """Adds `count` zero (or false) rows at the end of axis -2."""
    if count == 0:
        return x
    zeros = ops.zeros((*ops.shape(x)[:-2], count, x.shape[-1]), dtype=x.dtype)
    return ops.concatenate([x, zeros], axis=-2)
