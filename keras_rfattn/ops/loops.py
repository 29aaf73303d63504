"""Loops over blocks, and programs compiled once, that `keras.ops` does not offer."""

import functools

import keras
from keras import ops

from keras_rfattn.ops.sizes import is_known
from keras_rfattn.ops.sizes import is_traced
from keras_rfattn.ops.sizes import product

# Tokens, times heads, that PyTorch takes at once in `fold`, and numbers of features in
# `by_rows` and `by_heads`: what stays in a cache. A step costs PyTorch more than JAX.
AT_ONCE, NUMBERS = 2048, {"torch": 2**20, "jax": 2**18}
# The same of JAX on a GPU, where a step is many small programs: some GiB of memory.
AT_ONCE_ON_GPU = 2**19


def exclusive_scan(combine, start, elements):
    """Folds `elements` along axis 0, and keeps what came before each.

    Args:
        combine: `(carry, element) -> carry`, tuples of arrays; associative, and taking
            any axes before those of a carry.
        start: The first carry, a tuple of arrays.
        elements: Tuple of arrays of shape `(n, ...)`, n possibly unknown.

    Returns:
        `(last, before)`: the carry after all elements, and a tuple of arrays of
        shape `(n, ...)` with the carry before each.
    """
    if elements[0].shape[0] == 1:
        after = combine(start, tuple(x[0] for x in elements))
        return after, tuple(x[None] for x in start)
    if _is_on_gpu(start):
        return _scan_by_doubling(combine, start, elements)
    return ops.scan(lambda carry, x: (combine(carry, x), carry), start, elements)


def _scan_by_doubling(combine, start, elements):
    """`exclusive_scan` in log2(n) steps, each of which a GPU takes all at once."""
    both = zip(start, elements, strict=True)
    found, distance = [ops.concatenate([a[None], b], 0) for a, b in both], 1
    while distance < found[0].shape[0]:
        parts = (x[:-distance] for x in found), (x[distance:] for x in found)
        both = zip(found, combine(*map(tuple, parts)), strict=True)
        found = [ops.concatenate([x[:distance], y], 0) for x, y in both]
        distance *= 2
    return tuple(x[-1] for x in found), tuple(x[:-1] for x in found)


def compiled(function, /, **options):
    """`function` with its `options` set: one program for all calls of a shape.

    Without it JAX would compile a loop again in every call outside of a jit, and
    TensorFlow trace the same graph and gradient in every layer of a model.

    Args:
        function: A function of a module, of pytrees of arrays.
        **options: Hashable arguments of `function`; what is equal shares a program.
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
    """A function of the graph at hand, where one of another may know a map no more."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    # It may be a proxy, which has attributes and no dictionary of them.
    if not hasattr(graph, "_rfattn_functions"):
        graph._rfattn_functions = {}
    key = function, options
    if key not in graph._rfattn_functions:
        call = functools.partial(function, **dict(options))
        graph._rfattn_functions[key] = tf.function(call, autograph=False)
    return graph._rfattn_functions[key]


def fold(step, carry, blocks):
    """Runs `step` over blocks, one at a time where that saves memory and time.

    On JAX it is a loop, which computes a block again for the gradient and keeps none
    of it; a GPU takes as many blocks in a step as fill it. PyTorch takes as many as
    fit in a cache, because it pays for every operation. TensorFlow takes all.

    Args:
        step: `(carry, *blocks) -> (carry, found)` of any number of blocks.
        carry: Tuple of arrays.
        blocks: Pytrees of arrays of blocks along axis 2, as of `layout.cut_blocks` or
            `layout.cut_tokens`.

    Returns:
        `(carry, found)`, which are pytrees of such arrays too.
    """
    if keras.backend.backend() == "tensorflow":
        return step(carry, *blocks)
    if keras.backend.backend() == "torch":
        return _by_groups(step, carry, blocks)
    import jax
    import jax.numpy as jnp

    count, size = _sizes(blocks)
    # Blocks are taken one at a time if their number or the batch is unknown.
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
    """`fold` over a few blocks at a time."""
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
    """How many blocks there are, and tokens, times heads, in each, if known."""
    leaves = [x for x in keras.tree.flatten(blocks) if x is not None]
    sizes = [product(*x.shape[:2], *x.shape[3:-1]) for x in leaves]
    return leaves[0].shape[2], None if None in sizes else max(sizes)


def by_rows(function, arrays, size):
    """`function` of a few rows of the batch at a time on PyTorch, elsewhere of all.

    Args:
        function: Of arrays, to an array of shape `(B, ...)`.
        arrays: What it takes: pytrees of arrays `(B, ...)` or `(1, ...)`, or `None`.
        size: Floats held per batch row; all rows are taken at once if `None`.

    Returns:
        What `function` gives of all rows.
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
    """`function` of a few heads at a time where a CPU's cache would not hold all.

    Args:
        function: Hashable, of arrays, to an array of shape `(B, K, ...)`; what is equal
            shares a program.
        arrays: What it takes: pytrees of arrays `(·, K, ...)` or `(·, 1, ...)`, or
            `None`.
        size: Numbers that a head makes it hold; all heads are taken if `None`.
        limits: Numbers at once, by backend; `NUMBERS` if `None`.

    Returns:
        What `function` gives of all heads.
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
        # Heads may be on many devices.
        return function(*arrays)
    return compiled(_heads_in_turn, function=function, heads=heads)(arrays)


def _heads_in_turn(arrays, function, heads):
    """`by_heads` on JAX; all heads at once for a gradient, which keeps them all."""
    import jax
    import jax.numpy as jnp

    def at_once(arrays):
        return function(*arrays)

    def in_turn(arrays):
        count = max(x.shape[1] for x in jax.tree.leaves(arrays))

        def some(start):
            # Sliced where they are: blocks of heads to scan over would be a copy.
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
    """Whether a loop costs their device more than all of its steps at once."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() == "gpu"
    while isinstance(x, tuple):
        x = next(y for y in x if y is not None)
    return x.device.type != "cpu"


def _cut(arrays, size, axis):
    """Pytrees of `size` entries along an axis each; what has one is in all of them."""
    # Not by slices: in the gradient each would be as large as all.
    parts = [
        x if x is None or x.shape[axis] == 1 else x.split(size, axis)
        for x in keras.tree.flatten(arrays)
    ]
    count = max(len(x) for x in parts if isinstance(x, tuple))
    for i in range(count):
        leaves = [x[i] if isinstance(x, tuple) else x for x in parts]
        yield keras.tree.pack_sequence_as(arrays, leaves)
