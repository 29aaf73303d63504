"""Computation divided over the devices of a mesh, and exchange between them (JAX).

JAX is imported when a function is called, because no other backend divides sequences.
"""


def on_each_device(function, mesh, axis, divided, whole):
    """Calls a function on each device, with its stretch of tokens."""
    import jax
    from jax.sharding import PartitionSpec

    tokens = PartitionSpec(None, axis)
    call = jax.shard_map(
        function, mesh=mesh, in_specs=(tokens, PartitionSpec()), out_specs=tokens,
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return call(divided, whole)


def place_of(axis):
    """Returns `(place, count)`: the number of this device, and of all on the axis."""
    import jax

    return jax.lax.axis_index(axis), jax.lax.axis_size(axis)


def gathered(arrays, axis, tiled=False):
    """Returns the arrays of all devices, stacked, or joined along axis 0 if `tiled`."""
    import jax

    return jax.lax.all_gather(arrays, axis, tiled=tiled)


def from_neighbour(x, axis, offset):
    """Returns the array of the device `offset` places on; zeros where there is none."""
    import jax

    count = jax.lax.axis_size(axis)
    pairs = [(i + offset, i) for i in range(count) if 0 <= i + offset < count]
    return jax.lax.ppermute(x, axis, pairs)


def smallest_on(axis, x):
    """Returns the smallest of the arrays of all devices, entry by entry."""
    import jax

    return jax.lax.pmin(x, axis)
