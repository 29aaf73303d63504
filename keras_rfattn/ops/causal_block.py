"""What the queries of a block see of the keys before it and of those within.

The exponents of the keys within are taken relative to a reference that every query
of the block may know: the running maximum up to and including the block's first
visible key (`_reference`; not if a query with a prefix does not see it). Queries
share the shift of the prefix, keys exceed the reference by an *excess* that is known
per query (the largest over keys it sees). Two cases follow, row by row:

- excess <= `span`: the factored product is exact; whatever underflows is at most
  `C · M · exp(2 · span - 87)` of the row's sum, 1e-7.
- above it (logits in the hundreds, or the first tokens of a sequence meeting
  very different ones), the row is taken from `fallback` (`dyadic`), which never
  multiplies a query's exponents by those of keys it does not see and so needs no
  bound. It costs log2(C) times as much and runs only if some row asks for it.

Which case a row takes depends on keys the row sees, never on the future, on other
heads or on other sequences. (On JAX each block decides alone whether `dyadic` runs
at all, since blocks are visited one after the other; see `fold`.)
"""

import keras
from keras import ops

from keras_rfattn.ops.causal_fallback import weigh_keys
from keras_rfattn.ops.causal_fallback import weigh_values
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import elementwise_max
from keras_rfattn.ops.precision import elementwise_min
from keras_rfattn.ops.precision import lower_to
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sums import Reading
from keras_rfattn.ops.sums import combine
from keras_rfattn.ops.sums import look_up
from keras_rfattn.ops.sums import rebase


def read_block(prefix, query, key, value, mask, groups, span, fallback):
    """What the queries of each block see of the prefix and of their own block."""
    dtype = value.dtype
    reference = _reference(prefix, key.log_scale, mask)
    excess = key.log_scale - ops.expand_dims(reference, -2)
    visible = _visible(excess.shape[-2], groups)

    # (..., R): the largest excess among the keys a row sees.
    largest = ops.stop_gradient(ops.max(excess, axis=-1))
    largest = where(visible, ops.expand_dims(largest, -2), 0)
    largest = elementwise_max(ops.max(largest, axis=-1), 0)
    if not key.shares_scale:
        beyond = largest > span
        largest = elementwise_min(largest, span)
        excess = lower_to(excess, span)
    raised = query.log_scale + ops.expand_dims(reference, -2)
    shift = ops.stop_gradient(ops.max(raised, axis=-1)) + largest
    raised = query._replace(log_scale=raised)
    # Of signed features the exponents are needed again.
    rows = raised.expand(shift[..., None], dtype, query.is_exponential)
    if key.shares_scale:
        # One scale a token: it can leave the product for the C × C matrix.
        weights = _scaled_weights(raised, key, excess, shift, visible, dtype)
    else:
        keys = Features(key.values, excess)
        weights = weigh_keys(raised, rows, keys, shift)
    weights = tuple(where(visible, w, 0) for w in weights)
    own = weigh_values(weights, mask, value, shift)
    if not key.shares_scale:
        own = _replace_rows(own, beyond, query, key, value, mask, groups, fallback)
    before = look_up(rebase(prefix, reference), raised, rows, shift)
    return combine(before, own)


def _reference(prefix, log_scale, mask):
    """The running maximum that each query of a block that sees any key may know.

    It includes the block's first visible key. Where that is not the first token,
    queries ahead of it see at most the prefix, so that if there is one its maximum
    must do.
    """
    count = ops.cumsum(ops.cast(mask, "int32"), axis=-1)
    first = ops.cast(mask & (count == 1), log_scale.dtype)
    row = accumulated_matmul(first[..., None, :], ops.stop_gradient(log_scale))
    row = row[..., 0, :]
    has_prefix = ops.any(prefix.magnitude > 0, axis=-1, keepdims=True)
    known = ops.where(has_prefix, mask[..., :1], ops.any(mask, axis=-1)[..., None])
    return ops.where(known, elementwise_max(prefix.maximum, row), prefix.maximum)


def _visible(block_size, groups):
    """`(C · G, C)`: whether row r, of token `r // G`, sees key j."""
    token = ops.arange(block_size)
    row = token if groups == 1 else ops.repeat(token, groups)
    return row[:, None] >= token[None, :]


def _scaled_weights(query, key, excess, shift, visible, dtype):
    """`weigh_keys` where a token's features share one scale; `excess` is any size."""
    scale = query.log_scale - shift[..., None] + ops.swapaxes(excess, -1, -2)
    scale = ops.exp(where(visible, scale, LOWEST))
    return query.products(key, dtype) * scale, scale * query.width


def _replace_rows(own, beyond, query, key, value, mask, groups, fallback):
    """Takes the rows of `own` that are `beyond` the span from the fallback."""

    def replace(*operands):
        query, key, value = _unflatten(operands, signed)
        return tuple(fallback(query, key, value, mask, groups))

    def chosen(*operands):
        return ops.cond(
            ops.any(beyond),
            lambda: remat(replace)(*operands),
            lambda: tuple(ops.zeros_like(x) for x in own),
        )

    signed = query.is_signed
    # Else JAX would keep the residuals of the branch not taken.
    remat = keras.remat if keras.backend.backend() == "jax" else (lambda x: x)
    operands = [x for x in (*query, *key, value) if x is not None]
    replacement = Reading(*remat(chosen)(*operands))

    def select(a, b):
        rows = beyond[..., None] if len(a.shape) > len(beyond.shape) else beyond
        return ops.where(rows, a, b)

    return Reading(*(select(a, b) for a, b in zip(replacement, own, strict=True)))


def _unflatten(operands, signed):
    if signed:
        query_values, query_scale, key_values, key_scale, value = operands
    else:
        (query_scale, key_scale, value), query_values, key_values = operands, None, None
    query = Features(query_values, query_scale)
    return query, Features(key_values, key_scale), value
