"""Attention of a sequence that is divided over devices, one stretch of tokens on each.

Each device sums its own keys. One exchange gives each device the sums of all others,
whose size does not depend on the length, and they are merged exactly. A device then
reads what its queries may see: all sums, or, for causal attention, the sums of the
devices before it and its own tokens one by one. With a window, the tokens next to its
stretch come from its neighbours, and are left out of the sums that it reads.
"""

import keras
from keras import ops

from keras_rfattn.backend import compiled, largest_of, take_tokens
from keras_rfattn.backend.mesh import (
    from_neighbour,
    gathered,
    on_each_device,
    place_of,
    smallest_on,
)
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.state import State, in_float32, read_sums, sum_tokens
from keras_rfattn.ops.sums import Sums, no_sums, rebase
from keras_rfattn.ops.windows import Local, first_tokens, in_windows


def sequence_axis(query_length, key_length, options, is_causal):
    """Returns the mesh and the axis over which Keras divides sequences."""
    distribution = keras.distribution.distribution()
    # Only `distribution.SequenceParallel`, which needs JAX, has such an axis.
    axis = getattr(distribution, "sequence_dim_name", None)
    if axis is None:
        return None
    mesh, lengths = distribution.device_mesh.backend_mesh, (query_length, key_length)
    size = mesh.shape[axis]
    if size == 1 or not all(isinstance(x, int) and x % size == 0 for x in lengths):
        return None
    if options.window is not None:
        nearby = options.window * (2 if options.sliding else 1)
        if query_length != key_length:
            return None
        if key_length // size < nearby * (1 if is_causal else 2):
            return None
    return mesh, axis


def over_devices(query, key, value, local, key_mask, options, is_causal, mesh, axis):
    """Computes `bidirectional`, `causal` or `local_attention` over a mesh axis."""
    kernel, tokens, sinks = None, (), None
    if local is not None:
        kernel, tokens = local.kernel, (local.query, local.key)
    if local is not None and local.sinks:
        sinks = first_tokens(local.key, value, local.sinks, key_mask)
    call = compiled(
        _over_devices, kernel=kernel, options=options, is_causal=is_causal, mesh=mesh,
        axis=axis,
    )  # fmt: skip
    arrays = query.tokens(), key.tokens(), value, key_mask, *tokens
    return call(arrays, (query.shared(), key.shared(), sinks))


def _over_devices(arrays, shared, kernel, options, is_causal, mesh, axis):
    def on_a_device(arrays, shared):
        *shared, sinks = shared
        features = [x.joined(y) for x, y in zip(arrays[:2], shared, strict=True)]
        arrays = *features, *arrays[2:]
        if kernel is None:
            return _stretch(*arrays, options, is_causal, axis)
        return _windowed_stretch(*arrays, sinks, kernel, options, is_causal, axis)

    return on_each_device(on_a_device, mesh, axis, arrays, shared)


def _stretch(query, key, value, mask, options, is_causal, axis):
    """Returns the output for the queries of one device."""
    every = gathered(_summed(key, value, mask), axis)
    if not is_causal:
        return read_sums(_merged(every, None), query, value.dtype)
    place, count = place_of(axis)
    before = ops.arange(count) < place
    position = ops.zeros(ops.shape(value)[:1], "int32")
    state, size = State(_merged(every, before), position), options.block_size
    return causal(query, key, value, mask, size, state=state)


def _windowed_stretch(
    query, key, value, mask, near_query, near_key, sinks, kernel, options, is_causal,
    axis,
):  # fmt: skip
    """Returns the output for the queries of one device, with a window."""
    place, size = place_of(axis)
    (batch, length), window = ops.shape(value)[:2], options.window
    left = window * (2 if options.sliding else 1)
    right = 0 if is_causal else left
    mask = ops.ones((batch, length), "bool") if mask is None else mask

    # The stretch is summed in three parts: the tokens that the left neighbour gets,
    # those between, and those that the right neighbour gets.
    seen = ops.any(mask, axis=1)
    first = place * length + ops.argmax(ops.cast(mask, "int32"), axis=1)
    first = smallest_on(axis, ops.where(seen, first, size * length))
    position = place * length - first[:, None] + ops.arange(length)[None]
    summed, parts = mask & (position >= options.sinks), []
    for part in (slice(0, right), slice(right, length - left), slice(-left, None)):

        def cut(x, part=part):
            return x[:, part]

        parts.append(_summed(key.of_tokens(cut), cut(value), cut(summed)))
    parts = [ops.stack(x) for x in zip(*parts, strict=True)]
    every = [gathered(x, axis, tiled=True) for x in parts]
    number = ops.arange(3 * size)
    is_far = number < 3 * place - 1
    if not is_causal:
        is_far = is_far | (number > 3 * place + 3)
    far = _merged(every, is_far)

    def with_neighbours(x):
        parts = [from_neighbour(x[:, -left:], axis, -1), x]
        if right:
            parts.append(from_neighbour(x[:, :right], axis, 1))
        return ops.concatenate(parts, axis=1)

    # Rows are shifted, so that a window begins at the first token laid out.
    moved = ((place * length - left - first) % window)[:, None]
    total = left + length + right
    source = ops.arange(total + window)[None] - moved

    def lay_out(x):
        return take_tokens(with_neighbours(x), ops.clip(source, 0, total - 1))

    visible = lay_out(mask) & (source >= 0) & (source < total)
    features = [x.of_tokens(lay_out) for x in (query, key)]
    value, *tokens = map(lay_out, (value, near_query, near_key))
    local = Local(*tokens, kernel, window, options.sliding, options.sinks)
    start = place * length - left - first - moved[:, 0]
    if sinks is not None:
        sinks = sinks._replace(start=start)
    is_summed = lay_out(summed) & visible
    output, _ = in_windows(
        features, value, local, is_causal, visible, far, is_summed, sinks
    )
    return take_tokens(output, moved + left + ops.arange(length)[None])


def _summed(features, value, mask):
    """Returns the `Sums` of some tokens, or of no token, in float32."""
    if not value.shape[1]:
        sizes = features.width, value.shape[-1], features.scale_width
        return no_sums((ops.shape(value)[0], value.shape[2]), *sizes)
    return in_float32(sum_tokens(features, value, mask))


def _merged(every, which):
    """Merges `Sums`, stacked to shape `(n, B, ...)`."""

    def some(x, other):
        if which is None:
            return x
        return ops.where(ops.reshape(which, (-1, *(1,) * (len(x.shape) - 1))), x, other)

    sums = Sums(some(every[0], LOWEST), *(some(x, 0) for x in every[1:]))
    highest = largest_of(sums.maximum, axis=0)
    totals = (ops.sum(x, axis=0) for x in rebase(sums, highest)[1:])
    return Sums(highest, *totals)
