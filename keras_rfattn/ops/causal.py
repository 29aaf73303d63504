"""Causal linear attention in blocks: O(T · (M · V + C · M)), any length.

Keys before a query's block are read from prefix sums (`features.read`), exact
whatever their size, because each feature keeps its own running maximum. Keys in
the query's own block are weighed one by one, on a C × C matrix; see `block`.
"""

import keras
from keras import ops

from keras_rfattn.ops import features as f
from keras_rfattn.ops.backend import compiled
from keras_rfattn.ops.backend import exclusive_scan
from keras_rfattn.ops.backend import fold
from keras_rfattn.ops.backend import keep
from keras_rfattn.ops.backend import wide_dtype
from keras_rfattn.ops.block import read_block
from keras_rfattn.ops.dyadic import dyadic
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
        query_features: `Features` of shape `(B, T, N, M)`; or `Deferred`, which JAX
            computes block by block, so that no more than a block is ever held.
        key_features: The same of shape `(B, T, K, M)`.
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
    features = query_features, key_features
    arrays, functions = zip(*(_take_apart(x) for x in features), strict=True)
    call = compiled(
        _causal, num_heads=query_features.num_heads, functions=functions,
        block_size=block_size, span=SPAN, exact=dyadic,
    )  # fmt: skip
    output, sums = call(*arrays, value, key_mask, state)
    if not return_state:
        return output
    position = count_visible(value, key_mask)
    if state is not None:
        position = position + state.position
    return output, to_state(sums, position)


def _take_apart(features):
    """Arrays, and what makes `Features` of them, `None` if they are."""
    if not isinstance(features, f.Deferred):
        return features, None
    if keras.backend.backend() != "jax":
        # All blocks are taken at once there: nothing would be saved.
        return features.compute(), None
    function, *arrays = features
    return arrays, function


def _causal(
    query, key, value, key_mask, state, num_heads, functions, block_size, span, exact
):
    """The output, and the sums after the last token."""
    num_kv_heads, length = value.shape[2], ops.shape(value)[1]
    groups = num_heads // num_kv_heads
    if isinstance(length, int):
        block_size = min(block_size, max(length, 1))
    dtype, value = value.dtype, f.representable(value)

    query, query_features = _in_blocks(
        query, functions[0], num_kv_heads, block_size, groups
    )
    key, key_features = _in_blocks(key, functions[1], num_kv_heads, block_size)
    heads = _blocks(f.split_heads(value, num_kv_heads), block_size)
    mask = _block_mask(key_mask, length, block_size)

    def step(sums, query, key, value, mask):
        query, key = query_features(query), key_features(key)
        return _attend(sums, query, key, value, mask, groups, span, exact)

    start = _first_sums(key_features(_one_block(key)), heads, state)
    last, output = fold(step, tuple(start), (query, key, heads, mask))
    shape = ops.shape(output)
    output = ops.reshape(output, (*shape[:2], -1, shape[-1]))
    output = f.merge_heads(output[:, :, : length * groups], num_heads, length)
    return ops.cast(output, dtype), f.Sums(*last)


def _in_blocks(arrays, function, num_kv_heads, block_size, groups=1):
    """Arrays of shape `(B, K, T / C, C · G, ·)`, and what makes `Features` of some."""
    if function is None:
        features = f.heads_first(arrays, num_kv_heads)
        blocks = map_features(lambda x: _blocks(x, block_size * groups), features)
        return blocks, lambda blocks: blocks
    x, parameters = arrays

    def compute(block):
        # The map knows tokens, and one block of them at a time.
        tokens = f.merge_heads(block[:, :, 0], num_kv_heads * groups, block_size)
        features = f.heads_first(function(tokens, parameters), num_kv_heads)
        return map_features(lambda x: x[:, :, None], features)

    return _blocks(f.split_heads(x, num_kv_heads), block_size * groups), compute


def _one_block(blocks):
    """A block of zeros if features are to be computed: their shapes are wanted."""
    if isinstance(blocks, f.Features):
        return blocks
    shape = ops.shape(blocks)
    return ops.zeros((*shape[:2], 1, *shape[3:]), dtype=blocks.dtype)


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
    reading = read_block(prefix, query, key, value, mask, groups, span, exact)
    reading = f.Reading(*(keep(x) for x in reading))
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
