"""Sequences cut into blocks, and sums over the blocks before each."""

import keras
from keras import ops

from keras_rfattn.ops import features as f
from keras_rfattn.ops.backend import exclusive_scan
from keras_rfattn.ops.backend import wide_dtype
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.types import Deferred


def cut_blocks(x, size):
    """`(B, K, T, ·)` as `(B, K, T / size, size, ·)`, zeros after the end.

    At least one block.
    """
    shape = ops.shape(x)
    length = shape[2]
    if isinstance(length, int):
        padding = max(-(-length // size), 1) * size - length
    else:
        padding = ops.maximum(-(-length // size), 1) * size - length
    if not isinstance(padding, int) or padding:
        zeros = ops.zeros((*shape[:2], padding, shape[3]), dtype=x.dtype)
        x = ops.concatenate([x, zeros], axis=2)
    return ops.reshape(x, (shape[0], x.shape[1], -1, size, x.shape[3]))


def block_mask(key_mask, length, size):
    """Which keys of each block exist, `(B or 1, 1, T / C, C)`; `None` if all do."""
    if key_mask is not None:
        mask = f.heads_mask(key_mask)
    elif isinstance(length, int) and length and length % size == 0:
        return None
    else:
        mask = ops.ones((1, 1, length), dtype="bool")
    return cut_blocks(mask[..., None], size)[..., 0]


def take_apart(features):
    """Arrays, and what makes `Features` of them, `None` if they are."""
    if not isinstance(features, Deferred):
        return features, None
    if keras.backend.backend() != "jax":
        # All blocks are taken at once there: nothing would be saved.
        return features.compute(), None
    function, *arrays = features
    return arrays, function


def in_blocks(arrays, function, num_kv_heads, block_size, groups=1):
    """Arrays of shape `(B, K, T / C, C · G, ·)`, and what makes `Features` of some."""
    if function is None:
        features = f.heads_first(arrays, num_kv_heads)
        blocks = map_features(lambda x: cut_blocks(x, block_size * groups), features)
        return blocks, lambda blocks: blocks
    x, parameters = arrays

    def compute(block):
        # The map knows tokens, and one block of them at a time.
        tokens = f.merge_heads(block[:, :, 0], num_kv_heads * groups, block_size)
        features = f.heads_first(function(tokens, parameters), num_kv_heads)
        return map_features(lambda x: x[:, :, None], features)

    return cut_blocks(f.split_heads(x, num_kv_heads), block_size * groups), compute


def one_block(blocks):
    """A block of zeros if features are to be computed: their shapes are wanted."""
    if isinstance(blocks, tuple):
        return blocks
    shape = ops.shape(blocks)
    return ops.zeros((*shape[:2], 1, *shape[3:]), dtype=blocks.dtype)


def join_blocks(blocks, num_heads, length):
    """`(B, K, T / C, C · G, V)` as `(B, T, N, V)`, without what is after the end."""
    shape = ops.shape(blocks)
    rows = ops.reshape(blocks, (*shape[:2], -1, shape[-1]))
    rows = rows[:, :, : length * (num_heads // blocks.shape[1])]
    return f.merge_heads(rows, num_heads, length)


def no_sums(key, value):
    """The sums over no key at all; `key` and `value` give shapes and dtypes."""
    lead, dtype, scale = ops.shape(value)[:2], wide_dtype(value), key.log_scale
    return f.Sums(
        ops.full((*lead, scale.shape[-1]), f.LOWEST, dtype=scale.dtype),
        ops.zeros((*lead, key.width, value.shape[-1]), dtype=dtype),
        ops.zeros((*lead, key.width), dtype=dtype),
        ops.zeros((*lead, scale.shape[-1]), dtype=dtype),
        ops.zeros(lead, dtype=dtype),
    )


def prefix_sums(blocks, start):
    """Sums over all blocks before each, and over all: a scan over small states."""
    moved = tuple(ops.moveaxis(x, 2, 0) for x in blocks)

    def add(before, block):
        sums = f.merge_sums(f.Sums(*before), f.Sums(*block))
        return tuple(ops.cast(x, y.dtype) for x, y in zip(sums, start, strict=True))

    last, prefix = exclusive_scan(add, tuple(start), moved)
    prefix = f.Sums(*(ops.moveaxis(x, 0, 2) for x in prefix))
    return prefix, f.Sums(*last)
