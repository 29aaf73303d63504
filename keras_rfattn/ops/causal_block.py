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

from keras import ops

from keras_rfattn.ops.branch import run_if
from keras_rfattn.ops.causal_fallback import weigh_keys
from keras_rfattn.ops.causal_fallback import weigh_values
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import elementwise_max
from keras_rfattn.ops.precision import elementwise_min
from keras_rfattn.ops.precision import largest_of
from keras_rfattn.ops.precision import lower_to
from keras_rfattn.ops.precision import repeat_each
from keras_rfattn.ops.precision import smallest_of
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sums import combine
from keras_rfattn.ops.sums import look_up
from keras_rfattn.ops.sums import rebase


def read_block(prefix, query, key, value, mask, groups, span, fallback):
    """What the queries of each block see of the prefix and of their own block."""
    dtype = value.dtype
    reference = _reference(prefix, key.log_scale, mask)
    excess = key.log_scale - ops.expand_dims(reference, -2)
    visible = _visible(int(excess.shape[-2]), groups)

    # (..., R): the largest excess among the keys a row sees.
    largest = ops.stop_gradient(largest_of(excess, axis=-1))
    largest = where(visible, ops.expand_dims(largest, -2), 0)
    largest = elementwise_max(largest_of(largest, axis=-1), 0)
    if not key.shares_scale:
        beyond = largest > span
        largest = elementwise_min(largest, span)
        excess = lower_to(excess, span)
    raised = query.log_scale + ops.expand_dims(reference, -2)
    shift = ops.stop_gradient(largest_of(raised, axis=-1)) + largest
    raised = query._replace(log_scale=raised)
    # Of signed features the exponents are needed again.
    rows = raised.expand(ops.expand_dims(shift, -1), dtype, query.is_exponential)
    if key.shares_scale:
        # One scale a token: it can leave the product for the C × C matrix.
        weights = _scaled_weights(raised, key, excess, shift, visible, dtype)
    else:
        keys = Features(key.values, excess)
        weights = weigh_keys(raised, rows, keys, shift)
    weights = tuple(where(visible, w, 0) for w in weights)
    own_shift = shift
    if not key.shares_scale:
        weights, own_shift = _replace_rows(
            weights, shift, beyond, (query, key, mask), groups, dtype, fallback
        )
    own = weigh_values(weights, mask, value, own_shift)
    before = look_up(rebase(prefix, reference), raised, rows, shift)
    return combine(before, own)


def _reference(prefix, log_scale, mask):
    """The running maximum that each query of a block that sees any key may know.

    It includes the block's first visible key. Where that is not the first token,
    queries ahead of it see at most the prefix, so that if there is one its maximum
    must do.
    """
    log_scale = ops.stop_gradient(log_scale)
    if mask is None:
        return elementwise_max(prefix.maximum, log_scale[..., 0, :])
    position = ops.arange(mask.shape[-1], dtype="int32")
    first = where(mask, position, mask.shape[-1])
    first = position == smallest_of(first, axis=-1, keepdims=True)
    first = ops.cast(first, log_scale.dtype)
    row = accumulated_matmul(ops.expand_dims(first, -2), log_scale)[..., 0, :]
    has_prefix = ops.any(prefix.magnitude > 0, axis=-1, keepdims=True)
    # ONNX Runtime has no `where` of booleans.
    seen = ops.any(mask, axis=-1, keepdims=True)
    known = (has_prefix & mask[..., :1]) | (~has_prefix & seen)
    return ops.where(known, elementwise_max(prefix.maximum, row), prefix.maximum)


def _visible(block_size, groups):
    """`(C · G, C)`: whether row r, of token `r // G`, sees key j."""
    token = ops.arange(block_size)
    row = token if groups == 1 else repeat_each(token, groups)
    return row[:, None] >= token[None, :]


def _scaled_weights(query, key, excess, shift, visible, dtype):
    """`weigh_keys` where a token's features share one scale; `excess` is any size."""
    scale = query.log_scale - ops.expand_dims(shift, -1) + ops.swapaxes(excess, -1, -2)
    scale = ops.exp(where(visible, scale, LOWEST))
    return query.products(key, dtype) * scale, scale * query.width


def _replace_rows(weights, shift, beyond, features, groups, dtype, fallback):
    """Takes the rows that are `beyond` the span from the fallback.

    Args:
        weights: Tuple of arrays `(..., R, C)`.
        shift: What they are relative to, `(..., R)`.
        beyond: Booleans `(..., R)`.
        features: Queries, keys and the mask that `fallback` takes.
        groups: Query heads per key head.
        dtype: Compute dtype.
        fallback: `unbounded_weights`.

    Returns:
        Weights and shift with those rows replaced.
    """
    query, key, mask = features
    operands = [x for x in (*query, *key) if x is not None]

    def rescue(*operands):
        if query.is_signed:
            rows, columns = Features(*operands[:2]), Features(*operands[2:])
        else:
            rows, columns = (Features(None, x) for x in operands)
        weights, shift = fallback(rows, columns, mask, groups, dtype)
        return (*weights, ops.cast(shift, weights[0].dtype))

    nothing = (*weights, shift)
    found = run_if(ops.any(beyond), rescue, nothing, operands)
    *found, found_shift = found

    chosen = tuple(
        ops.where(ops.expand_dims(beyond, -1), a, b)
        for a, b in zip(found, weights, strict=True)
    )
    return chosen, ops.where(beyond, found_shift, shift)
