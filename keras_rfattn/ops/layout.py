"""Moves axes between layouts: heads first, and sequences cut into blocks.

Shapes use `·` for an axis of any size. In `T · G` the G query heads of a key head are
adjacent rows of their token.
"""

from keras import ops

from keras_rfattn.backend import is_known, is_zero, num_blocks
from keras_rfattn.ops.exponents import Exponents
from keras_rfattn.ops.masks import heads_mask


def heads_first(features, num_kv_heads):
    """Converts features `(B, T, N, M)` to heads first, `(B, K, T · G, M)`."""
    return features.of_tokens(lambda x: split_heads(x, num_kv_heads))


def split_heads(x, num_kv_heads):
    """Reshapes `(B, T, N, ·)` to `(B, K, T · G, ·)`."""
    batch, length = ops.shape(x)[0], ops.shape(x)[1]
    num_heads, width = x.shape[2], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, length, num_kv_heads, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, num_kv_heads, length * groups, width))


def merge_heads(x, num_heads, length):
    """Reshapes `(B, K, T · G, V)` back to `(B, T, N, V)`."""
    batch, num_kv_heads, width = ops.shape(x)[0], x.shape[1], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, num_kv_heads, length, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, length, num_heads, width))


def cut_blocks(x, size, groups=1):
    """Cuts `(B, K, T · G, ...)` into `(B, K, T / size, size · G, ...)`."""
    shape = ops.shape(x)
    count = num_blocks(shape[2] // groups, size)
    size = size * groups
    padding = count * size - shape[2]
    if not is_zero(padding):
        zeros = ops.zeros((*shape[:2], padding, *shape[3:]), dtype=x.dtype)
        x = ops.concatenate([x, zeros], axis=2)
    return ops.reshape(x, (shape[0], x.shape[1], count, size, *x.shape[3:]))


def cut_tokens(x, size):
    """Cuts `(B, T, N, ·)` into `(B, 1, T / size, size, N, ·)`, padded with zeros."""
    return cut_blocks(ops.expand_dims(x, 1), size)


def block_heads(blocks, num_kv_heads):
    """Reshapes `(B, 1, n, C, N, ·)` to `(B, K, n, C · G, ·)`."""
    batch, _, count, size, num_heads, width = ops.shape(blocks)
    groups = num_heads // num_kv_heads
    shape = batch, count, size, num_kv_heads, groups, width
    x = ops.transpose(ops.reshape(blocks, shape), (0, 3, 1, 2, 4, 5))
    return ops.reshape(x, (batch, num_kv_heads, count, size * groups, width))


def block_tokens(x, num_heads):
    """Reshapes `(B, K, n, C · G, ·)` back to `(B, 1, n, C, N, ·)`."""
    batch, num_kv_heads, count, rows, width = ops.shape(x)
    groups = num_heads // num_kv_heads
    shape = batch, num_kv_heads, count, rows // groups, groups, width
    x = ops.transpose(ops.reshape(x, shape), (0, 2, 3, 1, 4, 5))
    return ops.reshape(x, (batch, 1, count, rows // groups, num_heads, width))


def join_tokens(blocks, length):
    """Joins blocks `(B, 1, n, C, N, ·)` to `(B, T, N, ·)`, and cuts the padding off."""
    batch, _, count, size, num_heads, width = ops.shape(blocks)
    x = ops.reshape(blocks, (batch, count * size, num_heads, width))
    return x[:, :length]


def block_mask(key_mask, length, size):
    """Returns which keys of each block exist and are visible; `None` if all are."""
    if key_mask is not None:
        mask = heads_mask(key_mask)
    elif is_known(length) and length and length % size == 0:
        return None
    else:
        mask = ops.ones((1, 1, length), dtype="bool")
    return ops.squeeze(cut_blocks(ops.expand_dims(mask, -1), size), -1)


def in_blocks(features, num_kv_heads, block_size, groups=1):
    """Returns per-token arrays in blocks on axis 2, and a function for `Features`."""
    if not isinstance(features, Exponents):
        features = heads_first(features, num_kv_heads)
        blocks = features.of_tokens(lambda x: cut_blocks(x, block_size, groups))
        return blocks, lambda blocks: blocks

    def compute(x):
        # The product takes rows of tokens, so the blocks are joined for it.
        x = block_heads(x, num_kv_heads)
        count = ops.shape(x)[2]
        x = ops.reshape(x, (*ops.shape(x)[:2], -1, x.shape[-1]))

        def cut(x):
            lead = ops.shape(x)[:2]
            return ops.reshape(x, (*lead, count, block_size * groups, x.shape[-1]))

        return features._replace(x=x).compute().of_tokens(cut)

    return cut_tokens(features.x, block_size), compute


def move_axis(x, source, destination):
    """Moves an axis as `ops.moveaxis`, which `torch.vmap` does not support."""
    rank = len(x.shape)
    axes = [i for i in range(rank) if i != source % rank]
    axes.insert(destination % rank, source % rank)
    return ops.transpose(x, axes)
