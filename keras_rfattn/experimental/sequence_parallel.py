"""Divides sequences over the devices of a mesh, a stretch of tokens on each (JAX).

    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "sequence"], devices)
    keras.distribution.set_distribution(SequenceParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"))

Measured: the bytes that eight simulated devices exchange, which do not depend on the
length (the guide "Many devices" has the table). Not measured: any mesh of real devices.
A row of a results page with the time of a long sequence on one would bring it into
core.

Each device sums its own keys. One exchange gives each device the sums of all others,
and they are merged exactly. A device then reads what its queries may see: all sums, or,
for causal attention, the sums of the devices before it and its own tokens one by one.
With a window, the tokens next to its stretch come from its neighbours, and are left out
of the sums that it reads. All other parts of a transformer work on each token
separately.

Core does not know of it: layers ask the active distribution for `linear_attention`.
JAX is imported when a function is called, because no other backend divides sequences.
"""

import keras
from keras import ops

from keras_rfattn.backend import compiled, take_tokens
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.state import State, in_float32, read_state, sum_tokens
from keras_rfattn.ops.sums import Sums, no_sums, rebase
from keras_rfattn.ops.windows import Local, first_tokens, in_windows


class SequenceParallel(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that also splits sequences; needs JAX.

    Axis 1 of the data is split if its length is a multiple of the number of devices.
    Where the queries or keys of a layer cannot be split like this, or the layer has
    softmax attention, the compiler gathers the tokens it needs. The result equals that
    of one device up to rounding.

    Args:
        layout_map: `keras.distribution.LayoutMap`. Leave it empty to keep all weights
            on every device, or pass the result of `layout_map` to split weights too.
        batch_dim_name: Name of the mesh axis for the batch; the first axis by default.
        sequence_dim_name: Name of the mesh axis for tokens.
        **kwargs: Further arguments of `ModelParallel`.

    Raises:
        ValueError: If the mesh has no axis `sequence_dim_name`, or this axis is also
            the batch axis.
        NotImplementedError: If the backend is not JAX.
    """

    def __init__(
        self, *, layout_map=None, batch_dim_name=None, sequence_dim_name="sequence",
        **kwargs,
    ):  # fmt: skip
        backend = keras.backend.backend()
        if backend != "jax":
            raise NotImplementedError(
                f"Sequence parallelism needs the JAX backend. Received: {backend!r}."
            )
        super().__init__(layout_map=layout_map, batch_dim_name=batch_dim_name, **kwargs)
        names = list(self.device_mesh.axis_names)
        if sequence_dim_name not in names or sequence_dim_name == self.batch_dim_name:
            raise ValueError(
                f"`sequence_dim_name` must be an axis of the mesh, {names}, and not "
                f"the batch's, {self.batch_dim_name!r}. Received: "
                f"sequence_dim_name={sequence_dim_name!r}."
            )
        self.sequence_dim_name = sequence_dim_name
        self._size = self.device_mesh.shape[names.index(sequence_dim_name)]

    def get_data_layout(self, data_shape):
        """Returns the layout of a data array: batch on axis 0, tokens on axis 1."""
        axes = list(super().get_data_layout(data_shape).axes)
        if len(data_shape) > 1 and data_shape[1] and data_shape[1] % self._size == 0:
            axes[1] = self.sequence_dim_name
        return keras.distribution.TensorLayout(axes, self.device_mesh)

    def linear_attention(self, call, query, key, local, is_causal):
        """Returns the output of an `Attention` from features, `None` if not divided."""
        lengths = call.query.shape[1], call.key.shape[1]
        if not self._divides(*lengths, call.options, is_causal):
            return None
        mesh, axis = self.device_mesh.backend_mesh, self.sequence_dim_name
        arrays = query, key, call.value, local, call.mask.key_mask, call.options
        return over_devices(*arrays, is_causal, mesh, axis)

    def _divides(self, query_length, key_length, options, is_causal):
        size, lengths = self._size, (query_length, key_length)
        if size == 1 or not all(isinstance(x, int) and x % size == 0 for x in lengths):
            return False
        if options.window is None:
            return True
        nearby = options.window * (2 if options.sliding else 1)
        is_long = key_length // size >= nearby * (1 if is_causal else 2)
        return query_length == key_length and is_long


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

    import jax
    from jax.sharding import PartitionSpec

    tokens = PartitionSpec(None, axis)
    on_each_device = jax.shard_map(
        on_a_device, mesh=mesh, in_specs=(tokens, PartitionSpec()), out_specs=tokens,
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return on_each_device(arrays, shared)


def _stretch(query, key, value, mask, options, is_causal, axis):
    """Returns the output for the queries of one device."""
    import jax

    every = jax.lax.all_gather(_summed(key, value, mask), axis)
    if not is_causal:
        state = State(_merged(every, None), position=None)
        return read_state(state, query, value.dtype)
    before = ops.arange(jax.lax.axis_size(axis)) < jax.lax.axis_index(axis)
    position = ops.zeros(ops.shape(value)[:1], "int32")
    state, size = State(_merged(every, before), position), options.block_size
    return causal(query, key, value, mask, size, state=state)


def _windowed_stretch(
    query, key, value, mask, near_query, near_key, sinks, kernel, options, is_causal,
    axis,
):  # fmt: skip
    """Returns the output for the queries of one device, with a window."""
    import jax

    place, size = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    (batch, length), window = ops.shape(value)[:2], options.window
    left = window * (2 if options.sliding else 1)
    right = 0 if is_causal else left
    mask = ops.ones((batch, length), "bool") if mask is None else mask

    # The stretch is summed in three parts: the tokens that the left neighbour gets,
    # those between, and those that the right neighbour gets.
    seen = ops.any(mask, axis=1)
    first = place * length + ops.argmax(ops.cast(mask, "int32"), axis=1)
    first = jax.lax.pmin(ops.where(seen, first, size * length), axis)
    position = place * length - first[:, None] + ops.arange(length)[None]
    summed, parts = mask & (position >= options.sinks), []
    for part in (slice(0, right), slice(right, length - left), slice(-left, None)):

        def cut(x, part=part):
            return x[:, part]

        parts.append(_summed(key.of_tokens(cut), cut(value), cut(summed)))
    parts = [ops.stack(x) for x in zip(*parts, strict=True)]
    every = [jax.lax.all_gather(x, axis, tiled=True) for x in parts]
    number = ops.arange(3 * size)
    is_far = number < 3 * place - 1
    if not is_causal:
        is_far = is_far | (number > 3 * place + 3)
    far = _merged(every, is_far)

    def from_neighbour(x, offset):
        """Returns the array `offset` devices on; zeros where there is none."""
        pairs = [(i + offset, i) for i in range(size) if 0 <= i + offset < size]
        return jax.lax.ppermute(x, axis, pairs)

    def with_neighbours(x):
        parts = [from_neighbour(x[:, -left:], -1), x]
        if right:
            parts.append(from_neighbour(x[:, :right], 1))
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
    if sinks is not None:
        sinks = sinks._replace(start=place * length - left - first - moved[:, 0])
    masks = visible, far, lay_out(summed) & visible
    output, _ = in_windows(features, value, local, is_causal, *masks, sinks)
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
    highest = ops.amax(sums.maximum, axis=0)
    totals = (ops.sum(x, axis=0) for x in rebase(sums, highest)[1:])
    return Sums(highest, *totals)
