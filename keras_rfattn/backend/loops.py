"""Loops over blocks and programs compiled once, which `keras.ops` does not offer."""

import functools

import keras
from keras import ops

from keras_rfattn.backend.sizes import is_known, is_traced, product

# `AT_ONCE` is the number of tokens times heads that `fold` takes at once on PyTorch.
# `NUMBERS` is the number of features that `by_rows` and `by_heads` take at once. Both
# fit a cache. A step costs PyTorch more than JAX.
AT_ONCE, NUMBERS = 2048, {"torch": 2**20, "jax": 2**18}
# `AT_ONCE` for JAX on a GPU, where a step is many small kernels: some GiB of memory.
AT_ONCE_ON_GPU = 2**19


def exclusive_scan(combine, start, elements):
    """Folds `elements` along axis 0, and returns the carry before each of them.

    Args:
        combine: Function `(carry, element) -> carry` of tuples of arrays. It must be
            associative, and accept any leading axes before those of a carry.
        start: The first carry, a tuple of arrays.
        elements: Tuple of arrays of shape `(n, ...)`; n may be unknown.

    Returns:
        `(last, before)`: the carry after all elements, and a tuple of arrays of shape
        `(n, ...)` with the carry before each element.
    """
    if elements[0].shape[0] == 1:
        after = combine(start, tuple(x[0] for x in elements))
        return after, tuple(x[None] for x in start)
    if _is_on_gpu(start):
        return _scan_by_doubling(combine, start, elements)
    return ops.scan(lambda carry, x: (combine(carry, x), carry), start, elements)


def _scan_by_doubling(combine, start, elements):
    """Computes `exclusive_scan` in log2(n) steps, each over all elements at once."""
    both = zip(start, elements, strict=True)
    found, distance = [ops.concatenate([a[None], b], 0) for a, b in both], 1
    while distance < found[0].shape[0]:
        parts = (x[:-distance] for x in found), (x[distance:] for x in found)
        both = zip(found, combine(*map(tuple, parts)), strict=True)
        found = [ops.concatenate([x[:distance], y], 0) for x, y in both]
        distance *= 2
    return tuple(x[-1] for x in found), tuple(x[:-1] for x in found)


def compiled(function, /, **options):
    """Returns `function` with its `options` set, compiled once for each input shape.

    Without it JAX would compile a loop again in every call outside of `jax.jit`, and
    TensorFlow would trace the same graph and gradient in every layer of a model.

    Args:
        function: Module-level function that takes pytrees of arrays.
        **options: Hashable keyword arguments of `function`. Calls with equal options
            share a compiled program.

    Returns:
        A function of the array arguments.
    """
    if keras.backend.backend() == "jax":
        return functools.partial(_jit(), function, tuple(options.items()))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not tf.executing_eagerly():
            return _traced(function, tuple(options.items()))
    return functools.partial(function, **options)


@functools.cache
def _jit():
    import jax

    def call(function, options, *args):
        return function(*args, **dict(options))

    return jax.jit(call, static_argnums=(0, 1))


def _traced(function, options):
    """Returns a `tf.function` cached for the current graph.

    A function of another graph may refer to a feature map that no longer exists.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    # The graph may be a proxy, which has attributes but no `__dict__` of them.
    if not hasattr(graph, "_rfattn_functions"):
        graph._rfattn_functions = {}
    key = function, options
    if key not in graph._rfattn_functions:
        call = functools.partial(function, **dict(options))
        graph._rfattn_functions[key] = tf.function(call, autograph=False)
    return graph._rfattn_functions[key]


def fold(step, carry, blocks):
    """Runs `step` over blocks, one at a time where that saves memory and time.

    JAX loops over blocks; the gradient computes a block again and keeps none of it. On
    a GPU each step takes as many blocks as fill it. PyTorch takes as many blocks as fit
    in a cache, because every operation has a fixed cost there. TensorFlow takes all
    blocks at once.

    Args:
        step: Function `(carry, *blocks) -> (carry, found)` for any number of blocks.
        carry: Tuple of arrays.
        blocks: Pytrees of arrays with the blocks along axis 2, as `layout.cut_blocks`
            and `layout.cut_tokens` return them.

    Returns:
        `(carry, found)`: the last carry, and the results as pytrees with the blocks
        along axis 2.
    """
    if keras.backend.backend() == "tensorflow":
        return step(carry, *blocks)
    if keras.backend.backend() == "torch":
        return _by_groups(step, carry, blocks)
    import jax
    import jax.numpy as jnp

    count, size = _sizes(blocks)
    # Blocks are taken one at a time if their number or the batch size is unknown.
    is_whole = size and is_known(count) and _is_on_gpu(carry)
    most = min(count, max(1, AT_ONCE_ON_GPU // size)) if is_whole else 1
    each = next(i for i in range(most, 0, -1) if count % i == 0) if most > 1 else 1

    def split(x):
        shape = *x.shape[:2], count // each, each, *x.shape[3:]
        return jnp.moveaxis(x.reshape(shape), 2, 0)

    def joined(x):
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], count, *x.shape[4:])

    one = jax.checkpoint(lambda carry, some: step(carry, *some))
    carry, found = jax.lax.scan(one, carry, jax.tree.map(split, blocks))
    return carry, jax.tree.map(joined, found)


def _by_groups(step, carry, blocks):
    """Computes `fold` over a few blocks at a time."""
    count, size = _sizes(blocks)
    group = count if is_traced() else max(1, AT_ONCE // size)
    if is_traced() or _is_on_gpu(carry) or group >= count:
        return step(carry, *blocks)
    parts = []
    for part in _cut(blocks, group, 2):
        carry, found = step(carry, *part)
        parts.append(found)
    return carry, keras.tree.map_structure(lambda *x: ops.concatenate(x, 2), *parts)


def _sizes(blocks):
    """Returns the number of blocks, and of tokens times heads in each, if known."""
    leaves = [x for x in keras.tree.flatten(blocks) if x is not None]
    sizes = [product(*x.shape[:2], *x.shape[3:-1]) for x in leaves]
    return leaves[0].shape[2], None if None in sizes else max(sizes)


def by_rows(function, arrays, size):
    """Applies `function` to a few batch rows at a time on PyTorch, else to all.

    Args:
        function: Function of arrays that returns an array of shape `(B, ...)`.
        arrays: Arguments of the function: pytrees of arrays of shape `(B, ...)` or
            `(1, ...)`, or `None`.
        size: Floats held per batch row; all rows are taken at once if `None`.

    Returns:
        The result of `function` for all rows.
    """
    if keras.backend.backend() != "torch" or size is None or is_traced():
        return function(*arrays)
    if _is_on_gpu(arrays):
        return function(*arrays)
    leaves = [x for x in keras.tree.flatten(arrays) if x is not None]
    batch, rows = leaves[0].shape[0], max(1, NUMBERS["torch"] // size)
    if rows >= batch or any(x.shape[0] not in (1, batch) for x in leaves):
        return function(*arrays)

    parts = [function(*part) for part in _cut(arrays, rows, 0)]
    return ops.concatenate(parts, axis=0)


def by_heads(function, arrays, size, limits=None):
    """Applies `function` to a few heads at a time if a CPU's cache cannot hold all.

    Args:
        function: Hashable function of arrays that returns an array of shape
            `(B, K, ...)`. Equal functions share a compiled program.
        arrays: Arguments of the function: pytrees of arrays of shape `(·, K, ...)` or
            `(·, 1, ...)`, or `None`.
        size: Floats held per head; all heads are taken at once if `None`.
        limits: Floats to hold at once, by backend; `NUMBERS` if `None`.

    Returns:
        The result of `function` for all heads.
    """
    backend = keras.backend.backend()
    if size is None or backend == "torch" and (is_traced() or _is_on_gpu(arrays)):
        return function(*arrays)
    leaves = [x for x in keras.tree.flatten(arrays) if x is not None]
    count = max(x.shape[1] for x in leaves)
    limits = NUMBERS if limits is None else limits
    most = max(1, limits.get(backend, count * size) // max(size, 1))
    heads = max(i for i in range(1, count + 1) if count % i == 0 and i <= most)
    if heads == count:
        return function(*arrays)
    if backend == "torch":
        parts = [function(*part) for part in _cut(arrays, heads, 1)]
        return ops.concatenate(parts, axis=1)
    if keras.distribution.distribution() is not None:
        # With a distribution the heads may be on several devices.
        return function(*arrays)
    return compiled(_heads_in_turn, function=function, heads=heads)(arrays)


def _heads_in_turn(arrays, function, heads):
    """Computes `by_heads` on JAX; the gradient keeps, and takes, all heads at once."""
    import jax
    import jax.numpy as jnp

    def at_once(arrays):
        return function(*arrays)

    def in_turn(arrays):
        count = max(x.shape[1] for x in jax.tree.leaves(arrays))

        def some(start):
            # Slices are taken in place: `scan` over blocks of heads would copy the
            # array.
            def cut(x):
                if x.shape[1] != count:
                    return x
                return jax.lax.dynamic_slice_in_dim(x, start, heads, axis=1)

            return function(*jax.tree.map(cut, arrays))

        found = jax.lax.map(some, jnp.arange(0, count, heads))
        found = jnp.moveaxis(found, 0, 1)
        return found.reshape(found.shape[0], count, *found.shape[3:])

    @jax.custom_jvp
    def attend(arrays):
        return jax.lax.platform_dependent(arrays, cpu=in_turn, default=at_once)

    @attend.defjvp
    def gradient(primals, tangents):
        return jax.jvp(at_once, primals, tangents)

    return attend(arrays)


def _is_on_gpu(x):
    """Returns whether a loop on this device costs more than all its steps at once."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() == "gpu"
    while isinstance(x, tuple):
        x = next(y for y in x if y is not None)
    return x.device.type != "cpu"


def _cut(arrays, size, axis):
    """Yields pytrees of `size` entries along an axis; arrays of size 1 go to each."""
    # `split` is used because each slice would make a gradient as large as the array.
    parts = [
        x if x is None or x.shape[axis] == 1 else x.split(size, axis)
        for x in keras.tree.flatten(arrays)
    ]
    count = max(len(x) for x in parts if isinstance(x, tuple))
    for i in range(count):
        leaves = [x[i] if isinstance(x, tuple) else x for x in parts]
        yield keras.tree.pack_sequence_as(arrays, leaves)
