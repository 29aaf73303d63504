"""How the queries of a block read the keys before the block and the keys in it.

The exponents of the block's keys are taken relative to a reference (`_reference`) that
depends only on keys that every query of the block may see. It is the running maximum up
to and including the block's first visible key; it leaves that key out if there are
earlier keys and some query of the block does not see it. The part of a key's exponent
above the reference is its *excess*. The largest excess among the keys that a query sees
is known per query. Two cases follow, row by row:

- Excess <= `span`: the factored product is exact. What underflows is at most
  `C · M · exp(2 · span - 87)` of the row's sum, 1e-7.
- Excess > `span` (logits in the hundreds, or the first tokens of a sequence with very
  different keys): the row is taken from `fallback` (`unbounded_weights`). It never
  multiplies a query's exponents by those of keys that the query does not see, so it
  needs no bound. It costs more, and runs only if some row needs it.

The case depends only on keys that the row sees, never on future tokens, other heads or
other sequences. (On JAX each block decides separately whether the fallback runs at all,
because blocks are visited one after the other; see `fold`.)
"""

from keras import ops

from keras_rfattn.backend import accumulated_matmul, clip, run_if, where
from keras_rfattn.ops.causal_fallback import weigh_keys
from keras_rfattn.ops.features import LOWEST, Features
from keras_rfattn.ops.sums import Reading, look_up, lowered, rebase, weigh


def read_block(prefix, query, key, value, mask, groups, span, fallback):
    """Returns the `Reading` of each block's queries over the prefix and their block."""
    dtype = value.dtype
    reference = _reference(prefix, key.log_scale, mask)
    excess = key.log_scale - ops.expand_dims(reference, -2)
    visible = _visible(int(excess.shape[-2]), groups)

    # (..., R): the largest excess among the keys that a row sees.
    largest = ops.stop_gradient(ops.amax(excess, axis=-1))
    largest = where(visible, ops.expand_dims(largest, -2), 0)
    largest = clip(ops.amax(largest, axis=-1), low=0)
    if not key.shares_scale:
        exceeds = largest > span
        largest = clip(largest, high=span)
        excess = clip(excess, high=span)
    raised = query.log_scale + ops.expand_dims(reference, -2)
    shift = ops.stop_gradient(ops.amax(raised, axis=-1)) + largest
    raised = query._replace(log_scale=raised)
    rows = raised.expand(ops.expand_dims(shift, -1), dtype)
    if key.shares_scale:
        # A token's features share one scale, which can be applied to the C × C matrix.
        weights = _scaled_weights(raised, key, excess, shift, visible, dtype)
    else:
        keys = Features(key.values, excess)
        weights = weigh_keys(raised, rows, keys, shift)
    before = look_up(rebase(prefix, reference), raised, rows, shift)
    if not key.shares_scale:
        features = query, key, mask
        weights, rise = _replace_rows(
            weights, shift, exceeds, features, groups, dtype, fallback
        )
        before, shift = lowered(before, rise), shift + rise
    weights = [where(visible, w, 0) for w in weights]
    if mask is not None:
        weights = [where(ops.expand_dims(mask, -2), w, 0) for w in weights]
    own = weigh(weights[0], value, shift, *weights[1:])
    return Reading(shift, *(a + b for a, b in zip(before[1:], own[1:], strict=True)))


def _reference(prefix, log_scale, mask):
    """Returns a running maximum `(..., M)` that depends on keys all queries may see."""
    log_scale = ops.stop_gradient(log_scale)
    if mask is None:
        return clip(prefix.maximum, low=log_scale[..., 0, :])
    position = ops.arange(mask.shape[-1], dtype="int32")
    first = where(mask, position, mask.shape[-1])
    first = position == ops.amin(first, axis=-1, keepdims=True)
    first = ops.cast(first, log_scale.dtype)
    row = accumulated_matmul(ops.expand_dims(first, -2), log_scale)[..., 0, :]
    has_prefix = ops.any(prefix.magnitude > 0, axis=-1, keepdims=True)
    # ONNX Runtime has no `where` for booleans.
    seen = ops.any(mask, axis=-1, keepdims=True)
    known = (has_prefix & mask[..., :1]) | (~has_prefix & seen)
    return ops.where(known, clip(prefix.maximum, low=row), prefix.maximum)


def _visible(block_size, groups):
    """Returns booleans `(C · G, C)`: whether row r, of token `r // G`, sees key j."""
    row = ops.arange(block_size * groups) // groups
    return row[:, None] >= ops.arange(block_size)[None, :]


def _scaled_weights(query, key, excess, shift, visible, dtype):
    """Computes `weigh_keys` for features that share a scale; allows any `excess`."""
    scale = query.log_scale - ops.expand_dims(shift, -1) + ops.swapaxes(excess, -1, -2)
    scale = ops.exp(where(visible, scale, LOWEST))
    return query.products(key, dtype) * scale, scale * query.width


def _replace_rows(weights, shift, exceeds, features, groups, dtype, fallback):
    """Returns weights, with rows of the fallback, and how far these raise the shift."""
    query, key, mask = features
    operands = [shift, *(x for x in (*query, *key) if x is not None)]

    def rescue(shift, *operands):
        if not query.is_exponential:
            rows, columns = Features(*operands[:2]), Features(*operands[2:])
        else:
            rows, columns = (Features(None, x) for x in operands)
        rows = rows.raised(ops.expand_dims(-shift, -1))
        weights, rise = fallback(rows, columns, mask, groups, dtype)
        return (*weights, ops.cast(rise, weights[0].dtype))

    *found, rise = run_if(ops.any(exceeds), rescue, (*weights, shift), operands)
    rows = ops.expand_dims(exceeds, -1)
    chosen = (ops.where(rows, a, b) for a, b in zip(found, weights, strict=True))
    return tuple(chosen), where(exceeds, rise, 0)
