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
    batch, heads, blocks = ops.shape(key.log_scale)[:3]
    key = Features(key.values, masked_log_scale(key, mask))

    def cut(x, pieces, rows):
        # Heads and blocks share an axis: LiteRT and ONNX Runtime broadcast over five
        # at most. The batch keeps its own, so that both can be sharded.
        x = _pad_rows(x, pieces * rows - int(x.shape[-2]))
        return ops.reshape(x, (batch, heads * blocks, pieces, rows, x.shape[-1]))

    query = map_features(lambda x: cut(x, count, chunk * groups), query)
    number = ops.arange(count)
    chunk_of_key = ops.expand_dims(repeat_each(number, chunk), 0)
    number = ops.expand_dims(number, 1)
    keys = map_features(lambda x: cut(x, 1, count * chunk), key)
    far, far_shift = _earlier_chunks(query, keys, chunk_of_key < number, dtype)
    keys = map_features(lambda x: cut(x, count, chunk), key)
    own, own_shift = _own_chunk(*(map_features(_join_chunks, x) for x in (query, keys)))
    own_shift = ops.reshape(own_shift, ops.shape(far_shift))

    shift = elementwise_max(far_shift, own_shift)
    far_factor = ops.expand_dims(ops.exp(far_shift - shift), -1)
    own_factor = ops.expand_dims(ops.exp(own_shift - shift), -1)
    is_own = ops.expand_dims(chunk_of_key == number, 1)

    def joined(far, own):
        own = ops.reshape(own, (*ops.shape(far)[:-1], chunk)) * own_factor
        own = ops.tile(own, (1, 1, 1, 1, count))
        return whole(far * far_factor + where(is_own, own, 0))[..., :size]

    def whole(x):
        rows = count * chunk * groups
        x = ops.reshape(x, (batch, heads, blocks, rows, x.shape[-1]))
        return x[..., : size * groups, :]

    weights = tuple(joined(*x) for x in zip(far, own, strict=True))
    return weights, whole(ops.expand_dims(shift, -1))[..., 0]


def _join_chunks(x):
    """`(B, L, n, R, M)` to `(B, L · n, R, M)`."""
    batch, blocks, chunks, rows, width = ops.shape(x)
    return ops.reshape(x, (batch, blocks * chunks, rows, width))


def _chunk_length(size):
    """The power of two next above the square root of a block's length."""
    chunk = 1
    while chunk * chunk < size:
        chunk *= 2
    return chunk


def _earlier_chunks(query, key, is_earlier, dtype):
    """Weights for the keys of earlier chunks, and their shift.

    Args:
        query: `Features` of shape `(B, L, n, c · G, M)`, n chunks of c tokens.
        key: `Features` of shape `(B, L, 1, n · c, M)`.
        is_earlier: Booleans `(n, n · c)`.
        dtype: Compute dtype of the products.

    Returns:
        Tuple of weights `(B, L, n, c · G, n · c)`, and the shift `(B, L, n, c · G)`.
    """
    log_scale = where(ops.expand_dims(is_earlier, -1), key.log_scale, LOWEST)
    maximum = ops.stop_gradient(largest_of(log_scale, axis=-2))
    shift = query_shift(query, maximum)
    maximum = ops.expand_dims(maximum, -2)
    query = Features(query.values, query.log_scale + maximum)
    rows = query.expand(ops.expand_dims(shift, -1), dtype, query.is_exponential)
    key = Features(key.values, log_scale - maximum)
    weights = weigh_keys(query, rows, key, shift)
    is_earlier = ops.expand_dims(is_earlier, 1)
    return tuple(where(is_earlier, x, 0) for x in weights), shift


def _own_chunk(query, key):
    """Weights `(B, L, c · G, c)` for keys of the query's chunk, and their shift.

    Args:
        query: `Features` of shape `(B, L, c · G, M)`.
        key: `Features` of shape `(B, L, c, M)`.
    """
    rows, columns = (int(x.log_scale.shape[-2]) for x in (query, key))
    token = repeat_each(ops.arange(columns), rows // columns)
    visible = ops.expand_dims(token, 1) >= ops.expand_dims(ops.arange(columns), 0)
    visible = ops.expand_dims(visible, -1)
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
