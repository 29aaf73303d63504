"""Moves axes between layouts: heads first, and sequences cut into blocks.

Shapes use `·` for an axis of any size. In `T · G` the G query heads of a key head are
adjacent rows of their token.
"""

from keras import ops

from keras_rfattn.backend import is_known, is_zero, num_blocks
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


def features_in_blocks(features, num_kv_heads, size, groups=1):
    """Cuts features `(B, T, N, M)` into `(B, K, T / size, size · G, M)`."""
    features = heads_first(features, num_kv_heads)
    return features.of_tokens(lambda x: cut_blocks(x, size, groups))


def join_blocks(blocks, num_heads, length):
    """Joins blocks `(B, K, n, C · G, V)` to `(B, T, N, V)`, without padding."""
    batch, num_kv_heads, count, rows, width = ops.shape(blocks)
    x = ops.reshape(blocks, (batch, num_kv_heads, count * rows, width))
    x = x[:, :, : length * (num_heads // num_kv_heads)]
    return merge_heads(x, num_heads, length)


def block_mask(key_mask, length, size):
    """Returns which keys of each block exist and are visible; `None` if all are."""
    if key_mask is not None:
        mask = heads_mask(key_mask)
    elif is_known(length) and length and length % size == 0:
        return None
    else:
        mask = ops.ones((1, 1, length), dtype="bool")
    return ops.squeeze(cut_blocks(ops.expand_dims(mask, -1), size), -1)


def move_axis(x, source, destination):
    """Moves an axis as `ops.moveaxis`, which `torch.vmap` does not support."""
    rank = len(x.shape)
    axes = [i for i in range(rank) if i != source % rank]
    axes.insert(destination % rank, source % rank)
    return ops.transpose(x, axes)
