"""Rows of the attention matrix, which training compares; no algorithm forms them.

R is the number of queries, and G the number of query heads per key head.
"""

from keras import ops

from keras_rfattn.backend import accumulated_matmul, clip, where
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import heads_first, split_heads
from keras_rfattn.ops.masks import first_visible, heads_mask
from keras_rfattn.ops.sums import Reading, combine, normalize

# Products of a query's and a key's largest features are `exp(2 · LIFT)`, so that those
# of features that differ by ninety in their exponents are still represented. Smaller
# products count as `LEAST`. Inverses of both are factors of gradients, which must not
# overflow, nor become subnormal, because XLA sets subnormal numbers to 0.
LIFT, LEAST = 15.0, 1e-27


def kernel_rows(kernel, query, key, visible):
    """Returns the normalized attention weights `(B, K, R · G, S)` of a kernel."""
    return normalize(_by_kernel(kernel, query, key, visible), kernel)


def feature_rows(query_features, key_features, visible, key_mask=None, local=None):
    """Returns the normalized attention weights of features, as `kernel_rows` does."""
    num_kv_heads, mask = key_features.num_heads, heads_mask(key_mask)
    query = heads_first(query_features, num_kv_heads).compute()
    key = heads_first(key_features, num_kv_heads).hidden(mask).compute()
    far = visible if local is None else visible & ~local[-1]
    reading = _by_features(query, key, far)
    if local is not None:
        kernel, query_tokens, key_tokens, near = local
        near = _by_kernel(kernel, query_tokens, key_tokens, visible & near)
        reading = combine(near, reading)
    return normalize(reading, query)


def _by_features(query, key, visible):
    """Returns the `Reading` of rows, in which only visible keys have any part."""
    dtype = query.log_scale.dtype
    # Each query and each key is relative to its own largest exponent. A maximum over
    # keys would include keys that a row does not see.
    tops = [
        ops.stop_gradient(ops.amax(x.log_scale, axis=-1, keepdims=True)) - LIFT
        for x in (query, key)
    ]

    def products(method):
        rows, columns = (
            getattr(x, method)(top, dtype)
            for x, top in zip((query, key), tops, strict=True)
        )
        return accumulated_matmul(rows, columns, transpose_b=True)

    top = tops[0] + ops.swapaxes(tops[1], -1, -2)
    magnitudes = clip(products("magnitudes"), low=LEAST)
    exponent = where(visible, top + ops.log(magnitudes), LOWEST)
    shift = clip(ops.amax(exponent, axis=-1), low=LOWEST / 2)
    shift = ops.stop_gradient(shift)
    factor = ops.exp(where(visible, top - ops.expand_dims(shift, -1), LOWEST))
    weights = magnitudes = magnitudes * factor
    if not query.is_exponential:
        weights = products("expand") * factor
    denominator = bound = ops.sum(weights, axis=-1)
    if query.is_signed:
        bound = ops.sum(magnitudes, axis=-1)
        bound = bound * (query.width if query.shares_scale else 1)
    return Reading(shift, weights, denominator, bound)


def nearby(key_mask, rows, length, local, causal=False):
    """Returns which keys `local_attention` weighs by the kernel for each query."""
    positions = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
    rows = ops.expand_dims(ops.cast(rows, "int32"), 0)
    if key_mask is not None:
        first = first_visible(key_mask)
        # Positions before the first visible key count as after the end.
        positions, rows = ((x - first) % length for x in (positions, rows))
    is_sink = ops.expand_dims(positions < local.sinks, 1)
    positions, rows = positions // local.window, rows // local.window
    apart = ops.expand_dims(positions, 1) - ops.expand_dims(rows, 2)
    least, most = (-1, 0 if causal else 1) if local.sliding else (0, 0)
    return (apart >= least) & (apart <= most) | is_sink


def _by_kernel(kernel, query, key, visible):
    num_kv_heads = key.shape[2]
    query, key = (split_heads(x, num_kv_heads) for x in (query, key))
    weights, shift = kernel(query, key, visible)
    total = ops.sum(weights, axis=-1)
    seen = ops.any(ops.broadcast_to(visible, ops.shape(weights)), axis=-1)
    bound = ops.maximum(total, ops.cast(seen, total.dtype))
    return Reading(shift, weights, total, bound)
