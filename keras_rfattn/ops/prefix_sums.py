"""Prefix sums: for each block, the sums over all blocks before it."""

from keras import ops

from keras_rfattn.backend import (
    accumulated_matmul,
    exclusive_scan,
    is_known,
    loops_over_blocks,
    num_blocks,
    where,
)
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import move_axis
from keras_rfattn.ops.sums import Sums, cast_sums, merge_sums

# `GROUP` is the number of blocks that are summed at once, by weights for each pair.
# `LEVELS` is how often groups are grouped again if the number of blocks is unknown,
# which allows at most 2**16 of them.
GROUP, LEVELS = 16, 4


def prefix_sums(blocks, start):
    """Returns the sums over all blocks before each block, and over all blocks."""
    if not loops_over_blocks(blocks[0].shape[2]):
        return _without_loop(blocks, start)
    moved = tuple(move_axis(x, 2, 0) for x in blocks)

    def add(before, block):
        return tuple(cast_sums(merge_sums(Sums(*before), Sums(*block)), start))

    last, prefix = exclusive_scan(add, tuple(start), moved)
    prefix = Sums(*(move_axis(x, 0, 2) for x in prefix))
    return prefix, Sums(*last)


def _without_loop(blocks, start):
    """Computes `prefix_sums` without a loop, for any number of blocks."""
    batch, heads, count = ops.shape(blocks[0])[:3]

    def merged(x):
        return ops.reshape(x, (batch * heads, *ops.shape(x)[2:]))

    blocks, start = (Sums(*map(merged, sums)) for sums in (blocks, start))
    prefix = _before(blocks, start, count, LEVELS)
    last = merge_sums(*(Sums(*(y[:, -1] for y in x)) for x in (prefix, blocks)))

    def apart(x, like):
        return ops.cast(ops.reshape(x, (batch, heads, *ops.shape(x)[1:])), like.dtype)

    return tuple(
        Sums(*(apart(x, y) for x, y in zip(sums, start, strict=True)))
        for sums in (prefix, last)
    )


def _before(blocks, start, count, levels):
    """Returns the sums before each of `count` blocks along axis 1, with `start`."""
    first = Sums(*(ops.expand_dims(x, 1) for x in start))
    is_last = is_known(count) and count <= GROUP
    groups, size = (1, count) if is_last else (num_blocks(count, GROUP), GROUP)

    def cut(x):
        rest = ops.shape(x)[2:]
        if not is_last:
            zeros = (ops.shape(x)[0], groups * size - count, *rest)
            x = ops.concatenate([x, ops.zeros(zeros, dtype=x.dtype)], axis=1)
        return ops.reshape(x, (ops.shape(x)[0], groups, size, *rest))

    found = _within(Sums(*map(cut, blocks)), size)
    within = Sums(*(x[:, :, :-1] for x in found))
    totals = Sums(*(x[:, :, -1] for x in found))
    if not is_last and levels > 1:
        first = _before(totals, start, groups, levels - 1)
    elif not is_last:
        # One group is left, or two on PyTorch, where the second is padding.
        second = (x[:, :-1] for x in merge_sums(first, totals))
        both = zip(first, second, strict=True)
        first = Sums(*(ops.concatenate(x, axis=1) for x in both))
    first = Sums(*(ops.expand_dims(x, 2) for x in first))

    def joined(x):
        x = ops.reshape(x, (ops.shape(x)[0], groups * size, *ops.shape(x)[3:]))
        return x[:, :count]

    return Sums(*map(joined, merge_sums(first, within)))


def _within(blocks, size):
    """Returns the sums before each of `size` blocks along axis 2, and over all."""
    is_before = ops.arange(size)[None, :] < ops.arange(size + 1)[:, None]
    is_before = ops.reshape(is_before, (1, 1, size + 1, size, 1))
    scales = where(is_before, ops.expand_dims(blocks.maximum, 2), LOWEST)
    maximum = ops.amax(scales, axis=3)
    weights = ops.exp(scales - ops.expand_dims(maximum, 3))
    weights = where(is_before, weights, 0)
    weights = ops.transpose(weights, (0, 1, 4, 2, 3))

    def total(x):
        """Sums `(L, c, G, ·, M)` over the G blocks of a group, weighed per feature."""
        x = accumulated_matmul(weights, ops.transpose(x, (0, 1, 4, 2, 3)))
        return ops.transpose(x, (0, 1, 3, 4, 2))

    numerator, normalizer = blocks.numerator, ops.expand_dims(blocks.normalizer, 3)
    both = total(ops.concatenate([numerator, normalizer], axis=3))
    magnitude = total(ops.expand_dims(blocks.magnitude, 3))
    return Sums(maximum, both[:, :, :, :-1], both[:, :, :, -1], magnitude[:, :, :, 0])
