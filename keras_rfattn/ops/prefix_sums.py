"""Prefix sums: for each block, the sums over all blocks before it."""

from keras import ops

from keras_rfattn.backend import (
    accumulated_matmul,
    is_known,
    is_zero,
    num_blocks,
    where,
)
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.sums import Sums, cast_sums, merge_sums

# Up to `FEW` blocks are added one by one. Of more, `GROUP` are summed at once, by
# weights for each pair. `LEVELS` is how often groups are grouped again if the number of
# blocks is unknown, which allows at most 2**16 of them.
FEW, GROUP, LEVELS = 4, 16, 4


def prefix_sums(blocks, start):
    """Returns the sums over all blocks before each block, and over all blocks."""
    # Without a loop, which LiteRT has not and PyTorch's programs would repeat.
    count = ops.shape(blocks.maximum)[2]
    if is_known(count) and count <= FEW:
        sums = [start]
        for i in range(count):
            after = merge_sums(sums[-1], Sums(*(x[:, :, i] for x in blocks)))
            sums.append(cast_sums(after, start))
        *before, last = sums
        return Sums(*(ops.stack(x, axis=2) for x in zip(*before, strict=True))), last
    first = Sums(*(ops.expand_dims(x, 2) for x in start))
    prefix = cast_sums(_before(blocks, first, count, LEVELS), start)
    last = merge_sums(*(Sums(*(y[:, :, -1] for y in x)) for x in (prefix, blocks)))
    return prefix, cast_sums(last, start)


def _before(blocks, first, count, levels):
    """Returns the sums before each of `count` blocks; `first` is before all of them."""
    batch, heads = ops.shape(blocks.maximum)[:2]
    is_last = is_known(count) and count <= GROUP
    groups, size = (1, count) if is_last else (num_blocks(count, GROUP), GROUP)

    # Heads and groups share an axis because LiteRT and ONNX Runtime broadcast over at
    # most five axes. The batch keeps its own axis, so that both can be sharded.
    def cut(x):
        rest, missing = ops.shape(x)[3:], groups * size - count
        if not is_zero(missing):
            zeros = ops.zeros((batch, heads, missing, *rest), dtype=x.dtype)
            x = ops.concatenate([x, zeros], axis=2)
        return ops.reshape(x, (batch, heads * groups, size, *rest))

    def apart(x):
        return ops.reshape(x, (batch, heads, groups, *ops.shape(x)[2:]))

    def together(x):
        return ops.reshape(x, (batch, heads * groups, 1, *ops.shape(x)[3:]))

    def joined(x):
        x = ops.reshape(x, (batch, heads, groups * size, *ops.shape(x)[3:]))
        return x[:, :, :count]

    found = _within(Sums(*map(cut, blocks)), size)
    within = Sums(*(x[:, :, :-1] for x in found))
    totals = Sums(*(apart(x[:, :, -1]) for x in found))
    if not is_last and levels > 1:
        first = _before(totals, first, groups, levels - 1)
    elif not is_last:
        # One group is left, or two on PyTorch, where the second is padding.
        second = (x[:, :, :-1] for x in merge_sums(first, totals))
        both = zip(first, second, strict=True)
        first = Sums(*(ops.concatenate(x, axis=2) for x in both))
    return Sums(*map(joined, merge_sums(Sums(*map(together, first)), within)))


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
        """Sums `(B, L, G, ·, M)` over the G blocks of a group, weighed per feature."""
        x = accumulated_matmul(weights, ops.transpose(x, (0, 1, 4, 2, 3)))
        return ops.transpose(x, (0, 1, 3, 4, 2))

    numerator, normalizer = blocks.numerator, ops.expand_dims(blocks.normalizer, 3)
    both = total(ops.concatenate([numerator, normalizer], axis=3))
    magnitude = total(ops.expand_dims(blocks.magnitude, 3))
    return Sums(maximum, both[:, :, :, :-1], both[:, :, :, -1], magnitude[:, :, :, 0])
