"""Causal linear attention in blocks: O(T · (M · V + C · M)), any length.

Keys before a query's block are read from prefix sums (`features.read`), exact
whatever their size, because each feature keeps its own running maximum. Keys in
the query's own block are weighed one by one, on a C × C matrix. Their exponents
are taken relative to a reference that every query of the block may know: the
running maximum up to and including the block's first visible key (`_reference`; not
if a query with a prefix does not see it). Queries share
the shift of the prefix, keys exceed the reference by an *excess* that is known per
query (the largest over keys it sees). Two cases follow, row by row:

- excess <= `SPAN`: the factored product is exact; whatever underflows is at most
  `C · M · exp(2 · SPAN - 87)` of the row's sum, 1e-7.
- above it (logits in the hundreds, or the first tokens of a sequence meeting
  very different ones), the row is taken from `dyadic`, which never multiplies a
  query's exponents by those of keys it does not see and so needs no bound. It
  costs log2(C) times as much and runs only if some row asks for it.

Which case a row takes depends on keys the row sees, never on the future, on other
heads or on other sequences. (On JAX each block decides alone whether `dyadic` runs
at all, since blocks are visited one after the other; see `fold`.)
"""

import keras
from keras import ops

from keras_rfattn.ops import features as f
from keras_rfattn.ops.backend import accumulated_matmul
from keras_rfattn.ops.backend import elementwise_max
from keras_rfattn.ops.backend import elementwise_min
from keras_rfattn.ops.backend import exclusive_scan
from keras_rfattn.ops.backend import fold
from keras_rfattn.ops.backend import wide_dtype
from keras_rfattn.ops.dyadic import dyadic
from keras_rfattn.ops.dyadic import weigh_keys
from keras_rfattn.ops.dyadic import weigh_values
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.recurrent import count_visible
from keras_rfattn.ops.recurrent import to_state
from keras_rfattn.ops.recurrent import to_sums

SPAN = 30.0
DEFAULT_BLOCK_SIZE = 128


def causal(
    query_features,
    key_features,
    value,
    key_mask=None,
    block_size=None,
    state=None,
    return_state=False,
):
    """Linear attention in which query i sees keys `j <= i`.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`.
        key_features: `Features` of shape `(B, T, K, M)`.
        value: Array of shape `(B, T, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, T)`, true for visible keys. Hidden
            keys and values may hold anything, NaN included.
        block_size: Length of a block, 128 by default. Any positive integer, and
            no effect on the result.
        state: Optional `State` of earlier tokens, which every query sees.
        return_state: Whether to return the state after the last token too.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`, and the `State` if
        `return_state`. A row that sees no key is 0.

    Raises:
        ValueError: If `block_size` is not a positive integer.
    """
    block_size = check_block_size(block_size)
    num_kv_heads, num_heads = value.shape[2], query_features.log_scale.shape[2]
    groups = num_heads // num_kv_heads
    length = ops.shape(value)[1]
    if isinstance(length, int):
        block_size = min(block_size, max(length, 1))
    dtype, value = value.dtype, f.representable(value)

    query = f.heads_first(query_features, num_kv_heads)
    query = map_features(lambda x: _blocks(x, block_size * groups), query)
    key = f.heads_first(key_features, num_kv_heads)
    key = map_features(lambda x: _blocks(x, block_size), key)
    heads = _blocks(f.split_heads(value, num_kv_heads), block_size)
    mask = _block_mask(key_mask, length, block_size)

    start = _first_sums(key, heads, state)
    last, output = fold(
        _attend, tuple(start), (query, key, heads, mask),
        groups=groups, span=SPAN, exact=dyadic,
    )  # fmt: skip
    shape = ops.shape(output)
    output = ops.reshape(output, (*shape[:2], -1, shape[-1]))
    output = f.merge_heads(output[:, :, : length * groups], num_heads, length)
    output = ops.cast(output, dtype)
    if not return_state:
        return output
    position = count_visible(value, key_mask)
    if state is not None:
        position = position + state.position
    return output, to_state(f.Sums(*last), position)


def check_block_size(block_size):
    """Returns the block length to use, or raises `ValueError`."""
    if block_size is None:
        return DEFAULT_BLOCK_SIZE
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        block_size_is_valid = False
    else:
        block_size_is_valid = block_size > 0
    if not block_size_is_valid:
        raise ValueError(
            "`block_size` must be a positive integer or `None`. "
            f"Received: block_size={block_size}."
        )
    return block_size


def _blocks(x, size):
    """`(B, K, T, ·)` as `(B, K, T / size, size, ·)`, zeros after the end."""
    shape = ops.shape(x)
    padding = (-shape[2]) % size
    if not isinstance(padding, int) or padding:
        zeros = ops.zeros((*shape[:2], padding, shape[3]), dtype=x.dtype)
        x = ops.concatenate([x, zeros], axis=2)
    return ops.reshape(x, (shape[0], x.shape[1], -1, size, x.shape[3]))


def _block_mask(key_mask, length, size):
    """Which keys of each block exist, `(B or 1, 1, T / C, C)`; `None` if all do."""
    if key_mask is not None:
        mask = f.heads_mask(key_mask)
    elif isinstance(length, int) and length % size == 0:
        return None
    else:
        mask = ops.ones((1, 1, length), dtype="bool")
    return _blocks(mask[..., None], size)[..., 0]


def _first_sums(key, value, state):
    """The sums before the first block: those of `state`, or of no key at all."""
    lead, dtype = ops.shape(value)[:2], wide_dtype(value)
    scale = key.log_scale
    width = (scale if key.values is None else key.values).shape[-1]
    if state is not None:
        sums = to_sums(state)
    else:
        sums = f.Sums(
            ops.full((*lead, scale.shape[-1]), f.LOWEST, dtype=scale.dtype),
            ops.zeros((*lead, width, value.shape[-1]), dtype=dtype),
            ops.zeros((*lead, width), dtype=dtype),
            ops.zeros((*lead, scale.shape[-1]), dtype=dtype),
        )
    dtypes = (scale.dtype, dtype, dtype, dtype)
    return f.Sums(*(ops.cast(x, d) for x, d in zip(sums, dtypes, strict=True)))


def _attend(sums, query, key, value, mask, groups, span, exact):
    """What some blocks see of `sums` and of themselves, and the sums after them."""
    if mask is None:
        mask = ops.ones((1, 1, *ops.shape(value)[2:4]), dtype="bool")
    # Hidden rows leave before any product.
    key = f.Features(
        None if key.values is None else f.hide(key.values, mask),
        f.masked_log_scale(key, mask),
    )
    value = f.hide(value, mask)
    prefix, last = _prefix_sums(f.summarize(key, value, mask), f.Sums(*sums))
    reading = _read_block(prefix, query, key, value, mask, groups, span, exact)
    output = f.normalize(reading, signed=query.values is not None)
    return tuple(last), ops.cast(output, value.dtype)


def _prefix_sums(blocks, start):
    """Sums over all blocks before each, and over all: a scan over small states."""
    moved = tuple(ops.moveaxis(x, 2, 0) for x in blocks)

    def add(before, block):
        sums = f.merge_sums(f.Sums(*before), f.Sums(*block))
        return tuple(ops.cast(x, y.dtype) for x, y in zip(sums, start, strict=True))

    last, prefix = exclusive_scan(add, tuple(start), moved)
    prefix = f.Sums(*(ops.moveaxis(x, 0, 2) for x in prefix))
    return prefix, f.Sums(*last)


def _read_block(prefix, query, key, value, mask, groups, span, exact):
    """What the queries of each block see of the prefix and of their own block."""
    dtype = value.dtype
    reference = _reference(prefix, key.log_scale, mask)
    excess = key.log_scale - ops.expand_dims(reference, -2)
    visible = _visible(excess.shape[-2], groups)

    # (..., R): the largest excess among the keys a row sees.
    largest = ops.stop_gradient(ops.max(excess, axis=-1))
    largest = ops.where(visible, ops.expand_dims(largest, -2), 0)
    largest = elementwise_max(ops.max(largest, axis=-1), 0)
    shared_scale = key.log_scale.shape[-1] == 1
    if not shared_scale:
        beyond = largest > span
        largest = elementwise_min(largest, span)
        excess = elementwise_min(excess, span)
    shift = f.query_shift(query, reference) + largest

    log_scale = query.log_scale + ops.expand_dims(reference, -2)
    rows = f.Features(query.values, log_scale)
    if shared_scale:
        # One scale a token: it can leave the product for the C × C matrix.
        weights = _scaled_weights(rows, key, excess, shift, visible, dtype)
    else:
        keys = f.Features(key.values, excess)
        weights = weigh_keys(rows, keys, shift, dtype)
    weights = tuple(ops.where(visible, w, 0) for w in weights)
    own = weigh_values(weights, mask, value, shift)
    if not shared_scale:
        own = _replace_rows(own, beyond, query, key, value, mask, groups, exact)
    before = f.read(f.rebase(prefix, reference), query, shift, dtype)
    return f.combine(before, own)


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
    token = ops.repeat(ops.arange(block_size), groups)
    return token[:, None] >= ops.arange(block_size)[None, :]


def _scaled_weights(query, key, excess, shift, visible, dtype):
    """`weigh_keys` where a token's features share one scale; `excess` is any size."""
    scale = query.log_scale - shift[..., None] + ops.swapaxes(excess, -1, -2)
    scale = ops.exp(ops.where(visible, scale, f.LOWEST))
    rows = ops.cast(query.values, dtype)
    columns = ops.cast(key.values, dtype)
    weights = accumulated_matmul(rows, columns, transpose_b=True) * scale
    return weights, scale * query.values.shape[-1]


def _replace_rows(own, beyond, query, key, value, mask, groups, exact):
    """Takes the rows of `own` that are `beyond` the span from `exact`, `dyadic`."""

    def replace(*operands):
        query, key, value = _unflatten(operands, signed)
        return tuple(exact(query, key, value, mask, groups))

    def chosen(*operands):
        return ops.cond(
            ops.any(beyond),
            lambda: remat(replace)(*operands),
            lambda: tuple(ops.zeros_like(x) for x in own),
        )

    signed = query.values is not None
    # Else JAX would keep the residuals of the branch not taken.
    remat = keras.remat if keras.backend.backend() == "jax" else (lambda x: x)
    operands = [x for x in (*query, *key, value) if x is not None]
    replacement = f.Reading(*remat(chosen)(*operands))

    def select(a, b):
        rows = beyond[..., None] if len(a.shape) > len(beyond.shape) else beyond
        return ops.where(rows, a, b)

    return f.Reading(*(select(a, b) for a, b in zip(replacement, own, strict=True)))


def _unflatten(operands, signed):
    if signed:
        query_values, query_scale, key_values, key_scale, value = operands
    else:
        (query_scale, key_scale, value), query_values, key_values = operands, None, None
    query = f.Features(query_values, query_scale)
    return query, f.Features(key_values, key_scale), value
