"""Causal attention inside a block, for exponents of any size.

`causal` uses it for rows whose weights, as one product of query features and key
features, would overflow.

A block is cut into chunks of about the square root of its length. The exponents of the
keys in earlier chunks are taken relative to their maximum per feature. Every query of
the chunk may see these keys, so a query's largest term is 1 and its sum cannot
underflow. The keys in the query's own chunk are weighed one by one, and each pair of
query and key is taken relative to its own maximum.
"""

from keras import ops

from keras_rfattn.backend import (
    accumulated_matmul,
    elementwise_max,
    largest_of,
    repeat_each,
    where,
)
from keras_rfattn.ops.features import LOWEST, Features, masked_log_scale
from keras_rfattn.ops.sums import Reading, query_shift


def unbounded_weights(query, key, mask, groups, dtype):
    """Returns weights `(B, K, n, C · G, C)` of queries for keys of their block."""
    # `torch.jit.trace` records sizes as scalar tensors.
    size = int(key.log_scale.shape[-2])
    # The smallest power of two whose square is at least the length of the block.
    chunk = 1
    while chunk * chunk < size:
        chunk *= 2
    count = -(-size // chunk)
    batch, heads, blocks = ops.shape(key.log_scale)[:3]
    key = Features(key.values, masked_log_scale(key, mask))

    def cut(x, pieces, rows):
        # Heads and blocks share an axis because LiteRT and ONNX Runtime broadcast over
        # at most five axes. The batch keeps its own axis, so that both can be sharded.
        missing = pieces * rows - int(x.shape[-2])
        if missing:
            zeros = ops.zeros((*ops.shape(x)[:-2], missing, x.shape[-1]), dtype=x.dtype)
            x = ops.concatenate([x, zeros], axis=-2)
        return ops.reshape(x, (batch, heads * blocks, pieces, rows, x.shape[-1]))

    query = query.of_tokens(lambda x: cut(x, count, chunk * groups))
    number = ops.arange(count)
    chunk_of_key = ops.expand_dims(repeat_each(number, chunk), 0)
    number = ops.expand_dims(number, 1)
    keys = key.of_tokens(lambda x: cut(x, 1, count * chunk))
    far, far_shift = _earlier_chunks(query, keys, chunk_of_key < number, dtype)
    keys = key.of_tokens(lambda x: cut(x, count, chunk))

    def join_chunks(x):
        return ops.reshape(x, (batch, heads * blocks * count, *x.shape[-2:]))

    own, own_shift = _own_chunk(*(x.of_tokens(join_chunks) for x in (query, keys)))
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


def _earlier_chunks(query, key, is_earlier, dtype):
    """Returns the weights for the keys of earlier chunks, and their shift."""
    log_scale = where(ops.expand_dims(is_earlier, -1), key.log_scale, LOWEST)
    maximum = ops.stop_gradient(largest_of(log_scale, axis=-2))
    shift = query_shift(query, maximum)
    maximum = ops.expand_dims(maximum, -2)
    query = Features(query.values, query.log_scale + maximum)
    rows = query.expand(ops.expand_dims(shift, -1), dtype)
    key = Features(key.values, log_scale - maximum)
    weights = weigh_keys(query, rows, key, shift)
    is_earlier = ops.expand_dims(is_earlier, 1)
    return tuple(where(is_earlier, x, 0) for x in weights), shift


def _own_chunk(query, key):
    """Returns weights `(B, L, c · G, c)` for keys of the own chunk, and their shift."""
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
    """Returns the weights of every query for every key, `(..., R, S)`."""
    columns = key.expand(0, rows.dtype)
    weights = accumulated_matmul(rows, columns, transpose_b=True)
    if query.is_exponential:
        return (weights,)
    rows = query.magnitudes(ops.expand_dims(shift, -1), rows.dtype)
    columns = ops.cast(ops.exp(key.log_scale), rows.dtype)
    return weights, accumulated_matmul(rows, columns, transpose_b=True)


def weigh_values(weights, mask, value, shift):
    """Returns the `Reading` of values `(..., S, V)` by weights `(..., R, S)`."""
    if mask is not None:
        weights = tuple(where(ops.expand_dims(mask, -2), w, 0) for w in weights)
    # The numerator and the denominator use the same rounded weights, so that their
    # ratio is a weighted average.
    rounded = ops.cast(weights[0], value.dtype)
    numerator = accumulated_matmul(rounded, value)
    denominator = ops.sum(ops.cast(rounded, numerator.dtype), axis=-1)
    bound = ops.sum(weights[1], axis=-1) if len(weights) > 1 else denominator
    return Reading(shift, numerator, denominator, bound)
