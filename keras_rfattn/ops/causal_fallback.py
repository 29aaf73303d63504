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

from keras_rfattn.backend import accumulated_matmul, clip, where
from keras_rfattn.ops.features import LOWEST, Features


def unbounded_weights(query, key, mask, groups, dtype):
    """Returns weights `(B, K, n, C · G, C)` of queries for keys of their block."""
    # They are relative to the row's largest exponent, or 0 if that is larger; it is
    # returned too. What they are for later keys is undefined.
    # `torch.jit.trace` records sizes as scalar tensors.
    size = int(key.log_scale.shape[-2])
    # The smallest power of two whose square is at least the length of the block.
    chunk = 1
    while chunk * chunk < size:
        chunk *= 2
    count = -(-size // chunk)
    batch, heads, blocks = ops.shape(key.log_scale)[:3]
    key = key.hidden(mask)

    def cut(x, pieces, rows):
        # Heads and blocks share an axis because LiteRT and ONNX Runtime broadcast over
        # at most five axes. The batch keeps its own axis, so that both can be sharded.
        missing = pieces * rows - int(x.shape[-2])
        if missing:
            zeros = ops.zeros((*ops.shape(x)[:-2], missing, x.shape[-1]), dtype=x.dtype)
            x = ops.concatenate([x, zeros], axis=-2)
        return ops.reshape(x, (batch, heads * blocks, pieces, rows, x.shape[-1]))

    def join_chunks(x):
        return ops.reshape(x, (batch, heads * blocks * count, *x.shape[-2:]))

    query = query.of_tokens(lambda x: cut(x, count, chunk * groups))
    keys = key.of_tokens(lambda x: cut(x, 1, count * chunk))
    # (count, S): whether a key is in a chunk before that of the queries.
    start = ops.expand_dims(ops.arange(count) * chunk, 1)
    is_earlier = ops.expand_dims(ops.arange(count * chunk), 0) < start
    log_scale = where(ops.expand_dims(is_earlier, -1), keys.log_scale, LOWEST)
    maximum = ops.stop_gradient(ops.amax(log_scale, axis=-2, keepdims=True))
    raised = query.raised(maximum)
    rows = query.of_tokens(join_chunks)
    own = key.of_tokens(lambda x: join_chunks(cut(x, count, chunk)))
    exponent = _pair_exponents(rows, own)

    shift = ops.stop_gradient(ops.amax(exponent, axis=(-2, -1)))
    shift = ops.reshape(shift, ops.shape(raised.log_scale)[:-1])
    far_shift = ops.stop_gradient(ops.amax(raised.log_scale, axis=-1))
    shift = clip(clip(shift, low=far_shift), low=0)
    # The keys of earlier chunks by a product, those of the same chunk one by one.
    column = ops.expand_dims(shift, -1)
    far = Features(keys.values, log_scale - maximum)
    far = weigh_keys(raised, raised.expand(column, dtype), far, shift)
    own = _weigh_pairs(
        rows, own, ops.exp(exponent - ops.expand_dims(join_chunks(column), -1))
    )

    def joined(far, own):
        own = ops.reshape(own, (*ops.shape(far)[:-1], chunk))
        own = ops.tile(own, (1, 1, 1, 1, count))
        return whole(where(ops.expand_dims(is_earlier, 1), far, own))[..., :size]

    def whole(x):
        rows = count * chunk * groups
        x = ops.reshape(x, (batch, heads, blocks, rows, x.shape[-1]))
        return x[..., : size * groups, :]

    weights = tuple(joined(*x) for x in zip(far, own, strict=True))
    return weights, whole(column)[..., 0]


def _pair_exponents(query, key):
    """Returns exponents `(B, L, c · G, c, M)`, at `2 * LOWEST` for later keys."""
    rows, columns = (int(x.log_scale.shape[-2]) for x in (query, key))
    token = ops.arange(rows) // (rows // columns)
    visible = ops.expand_dims(token, 1) >= ops.expand_dims(ops.arange(columns), 0)
    exponent = ops.expand_dims(query.log_scale, -2) + ops.expand_dims(key.log_scale, -3)
    return where(ops.expand_dims(visible, -1), exponent, 2 * LOWEST)


def _weigh_pairs(query, key, magnitudes):
    """Returns the weights of pairs `(B, L, c · G, c, M)`."""
    if query.is_exponential:
        return (ops.sum(magnitudes, axis=-1),)
    values = (ops.cast(x.values, magnitudes.dtype) for x in (query, key))
    products = [ops.expand_dims(x, a) for x, a in zip(values, (-2, -3), strict=True)]
    products = products[0] * products[1] * magnitudes
    return tuple(ops.sum(x, axis=-1) for x in (products, magnitudes))


def weigh_keys(query, rows, key, shift):
    """Returns the weights of every query for every key, `(..., R, S)`."""
    columns = key.expand(0, rows.dtype)
    weights = accumulated_matmul(rows, columns, transpose_b=True)
    if query.is_exponential:
        return (weights,)
    rows = query.magnitudes(ops.expand_dims(shift, -1), rows.dtype)
    columns = ops.cast(ops.exp(key.log_scale), rows.dtype)
    return weights, accumulated_matmul(rows, columns, transpose_b=True)
