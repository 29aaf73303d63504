"""Where heads and tokens stand: key heads first, sequences cut into blocks."""

import keras
from keras import ops

from keras_rfattn.ops.features import Deferred
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.not_finite import limited
from keras_rfattn.ops.sizes import is_known
from keras_rfattn.ops.sizes import is_zero
from keras_rfattn.ops.sizes import leading
from keras_rfattn.ops.sizes import num_blocks


def heads_first(
    features, num_kv_heads, is_relative=False, is_lazy=False, is_apart=True
):
    """`(B, T, N, M)` features as `Marked` `(B, K, T · G, M)`, groups by token.

    Args:
        features: `Features`, `Marked` or `Deferred`.
        num_kv_heads: K.
        is_relative: Whether a factor for each token may be left out.
        is_lazy: Whether the features may be `Exponents`, yet to be computed.
        is_apart: Whether tokens that are not finite are marked; otherwise they are NaN.
    """
    if isinstance(features, Deferred):
        x, choices = split_heads(features.x, num_kv_heads), (is_lazy, is_apart)
        parameters = features.parameters
        return features.function.heads_first(x, parameters, is_relative, *choices)
    return map_features(lambda x: split_heads(x, num_kv_heads), limited(features))


def split_heads(x, num_kv_heads):
    """`(B, T, N, ·)` as `(B, K, T · G, ·)`."""
    batch, length = ops.shape(x)[0], ops.shape(x)[1]
    num_heads, width = x.shape[2], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, length, num_kv_heads, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, num_kv_heads, length * groups, width))


def merge_heads(x, num_heads, length):
    """`(B, K, T · G, V)` back as `(B, T, N, V)`."""
    batch, num_kv_heads, width = ops.shape(x)[0], x.shape[1], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, num_kv_heads, length, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, length, num_heads, width))


def last_apart(x, axis=-1):
    """`(..., V + 1)` as `(..., V)` and `(...)`; or so along axis -2."""
    if keras.backend.backend() == "torch":
        # One array in the gradient, where each slice would be one.
        rest, last = x.split([x.shape[axis] - 1, 1], axis)
        return rest, last.squeeze(axis)
    if axis == -2:
        return x[..., :-1, :], x[..., -1, :]
    return x[..., :-1], x[..., -1]


def cut_blocks(x, size, groups=1):
    """`(B, K, T · G, ...)` as `(B, K, T / size, size · G, ...)`, zeros after the end.

    At least one block.
    """
    shape = ops.shape(x)
    count = num_blocks(shape[2] // groups, size)
    size = size * groups
    padding = count * size - shape[2]
    if not is_zero(padding):
        zeros = ops.zeros((*shape[:2], padding, *shape[3:]), dtype=x.dtype)
        x = ops.concatenate([x, zeros], axis=2)
    return ops.reshape(x, (shape[0], x.shape[1], count, size, *x.shape[3:]))


def cut_tokens(x, size):
    """`(B, T, N, ·)` as `(B, 1, T / size, size, N, ·)`, zeros after the end.

    Tokens stay where they are: heads are put first block by block (`block_heads`), in a
    cache, where moving all of them would take fresh memory for each array.
    """
    return cut_blocks(ops.expand_dims(x, 1), size)


def block_heads(blocks, num_kv_heads):
    """`(B, 1, n, C, N, ·)` as `(B, K, n, C · G, ·)`, groups by token."""
    batch, _, count, size, num_heads, width = ops.shape(blocks)
    groups = num_heads // num_kv_heads
    shape = batch, count, size, num_kv_heads, groups, width
    x = ops.transpose(ops.reshape(blocks, shape), (0, 3, 1, 2, 4, 5))
    return ops.reshape(x, (batch, num_kv_heads, count, size * groups, width))


def block_tokens(x, num_heads):
    """`(B, K, n, C · G, ·)` back as `(B, 1, n, C, N, ·)`."""
    batch, num_kv_heads, count, rows, width = ops.shape(x)
    groups = num_heads // num_kv_heads
    shape = batch, num_kv_heads, count, rows // groups, groups, width
    x = ops.transpose(ops.reshape(x, shape), (0, 2, 3, 1, 4, 5))
    return ops.reshape(x, (batch, 1, count, rows // groups, num_heads, width))


def join_tokens(blocks, length):
    """`(B, 1, n, C, N, ·)` as `(B, T, N, ·)`, without what is after the end."""
    batch, _, count, size, num_heads, width = ops.shape(blocks)
    x = ops.reshape(blocks, (batch, count * size, num_heads, width))
    return leading(x, length, 1)


def block_mask(key_mask, length, size):
    """Which keys of each block exist, `(B or 1, 1, T / C, C)`; `None` if all do."""
    if key_mask is not None:
        mask = heads_mask(key_mask)
    elif is_known(length) and length and length % size == 0:
        return None
    else:
        mask = ops.ones((1, 1, length), dtype="bool")
    return ops.squeeze(cut_blocks(ops.expand_dims(mask, -1), size), -1)


def take_apart(features):
    """Arrays, and what makes `Features` of them, `None` if they are."""
    if not isinstance(features, Deferred):
        return features, None
    function, *arrays = features
    return arrays, function


def in_blocks(arrays, function, num_kv_heads, block_size, groups=1, is_relative=False):
    """Arrays of blocks along axis 2, and what makes `Features` of some of them.

    These have the shape `(B, K, n, C · G, ·)`.
    """
    if function is None:
        features = heads_first(arrays, num_kv_heads)
        blocks = map_features(lambda x: cut_blocks(x, block_size, groups), features)
        return blocks, lambda blocks: blocks
    x, parameters = arrays

    def compute(block):
        # The map knows tokens, and these blocks of them at a time.
        block = block_heads(block, num_kv_heads)
        rows = ops.reshape(block, (*ops.shape(block)[:2], -1, block.shape[-1]))
        features = function.heads_first(rows, parameters, is_relative)
        count = ops.shape(block)[2]

        def cut(x):
            lead = ops.shape(x)[:2]
            return ops.reshape(x, (*lead, count, block_size * groups, x.shape[-1]))

        return map_features(cut, features)

    return cut_tokens(x, block_size), compute


def one_block(blocks):
    """A block of zeros if features are to be computed: their shapes are wanted."""
    if isinstance(blocks, tuple):
        return blocks
    shape = ops.shape(blocks)
    return ops.zeros((*shape[:2], 1, *shape[3:]), dtype=blocks.dtype)


def take_tokens(x, index):
    """The tokens `index` `(B, L)` of each row of x, `(B, T, ...)` to `(B, L, ...)`."""
    if keras.backend.backend() == "tensorflow":
        # Keras' way takes a batch of unknown size to be at least 1.
        import tensorflow as tf

        return tf.gather(x, index, axis=1, batch_dims=1)
    if keras.backend.backend() == "torch":
        # Whole tokens at once: Keras' way reads an index for each of their numbers.
        (batch, length), size = ops.shape(x)[:2], ops.shape(index)
        start = length * ops.arange(batch, dtype=index.dtype)[:, None]
        found = x.flatten(0, 1).index_select(0, (start + index).flatten())
        return found.reshape(*size, *x.shape[2:])
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(x.shape) - 2)))
    return take_along(x, index, 1)


def take_along(x, index, axis):
    """The entries `index` of x along an axis; its other sizes are those of x, or 1."""
    if keras.backend.backend() == "torch":
        # Keras' way binds an exported program to the size of the batch.
        sizes = [-1 if i == axis else size for i, size in enumerate(x.shape)]
        return x.gather(axis, index.expand(sizes).long())
    return ops.take_along_axis(x, index, axis=axis)


def move_axis(x, source, destination):
    """As `ops.moveaxis`, for which `torch.vmap` has no rule on PyTorch."""
    rank = len(x.shape)
    axes = [i for i in range(rank) if i != source % rank]
    axes.insert(destination % rank, source % rank)
    return ops.transpose(x, axes)
