"""Loops over blocks, and programs compiled once, that `keras.ops` does not offer."""

import functools

import keras
from keras import ops

# Tokens, times heads, that PyTorch takes at once in `fold`, and numbers of features in
# `by_rows`: what stays in a cache.
AT_ONCE, NUMBERS = 2048, 2**20
# What `keep` marks, for JAX.
KEPT = "keras_rfattn"


def exclusive_scan(combine, start, elements):
    """Folds `elements` along axis 0, and keeps what came before each.

    Args:
        combine: `(carry, element) -> carry`, tuples of arrays.
        start: The first carry, a tuple of arrays.
        elements: Tuple of arrays of shape `(n, ...)`, n possibly unknown.

    Returns:
        `(last, before)`: the carry after all elements, and a tuple of arrays of
        shape `(n, ...)` with the carry before each.
    """
    if keras.backend.backend() == "tensorflow":
        # `keras.ops.scan` needs to know n beforehand on TensorFlow.
        import tensorflow as tf

        after = tf.scan(combine, elements, initializer=start)
        before = tuple(
            ops.concatenate([a[None], b[:-1]], axis=0)
            for a, b in zip(start, after, strict=True)
        )
        return tuple(b[-1] for b in after), before

    return ops.scan(lambda carry, x: (combine(carry, x), carry), start, elements)


def compiled(function, **options):
    """`function` with its `options` set: on JAX one program, for all calls of a shape.

    Without it a loop would be compiled again in every call outside of a jit.

    Args:
        function: A function of a module, of pytrees of arrays.
        **options: Hashable arguments of `function`; what is equal shares a program.
    """
    if keras.backend.backend() != "jax":
        return functools.partial(function, **options)
    return functools.partial(_jit(), function, tuple(options.items()))


@functools.cache
def _jit():
    import jax

    def call(function, options, *args):
        return function(*args, **dict(options))

    return jax.jit(call, static_argnums=(0, 1))


def keep(x):
    """Marks an array that `fold` keeps for the gradient, not to compute it again."""
    if keras.backend.backend() != "jax":
        return x
    import jax

    return jax.ad_checkpoint.checkpoint_name(x, KEPT)


def fold(step, carry, blocks):
    """Runs `step` over blocks, one at a time where that saves memory and time.

    On JAX a loop, which computes a block again in the backward pass: all that a
    block needs fits in a cache, and none of it is kept for the gradient.
    PyTorch pays for a loop operation by operation, and takes as many blocks in one
    step as fit in a cache; TensorFlow takes all of them.

    Args:
        step: `(carry, *blocks) -> (carry, output)` of any number of blocks.
        carry: Tuple of arrays.
        blocks: Pytrees of arrays of shape `(B, K, n, ...)`.

    Returns:
        `(carry, output)`, the output of shape `(B, K, n, ...)`.
    """
    if keras.backend.backend() == "tensorflow":
        return step(carry, *blocks)
    if keras.backend.backend() == "torch":
        return _by_groups(step, carry, blocks)
    import jax
    import jax.numpy as jnp

    policy = jax.checkpoint_policies.save_only_these_names(KEPT)

    @functools.partial(jax.checkpoint, policy=policy)
    def one(carry, blocks):
        blocks = jax.tree.map(lambda x: x[:, :, None], blocks)
        carry, output = step(carry, *blocks)
        return carry, output[:, :, 0]

    first = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), blocks)
    carry, output = jax.lax.scan(one, carry, first)
    return carry, jnp.moveaxis(output, 0, 2)


def _by_groups(step, carry, blocks):
    """`fold` over a few blocks at a time."""
    leaves = [x for x in keras.tree.flatten(blocks) if x is not None]
    batch, heads, tokens = (max(x.shape[i] for x in leaves) for i in (0, 1, 3))
    count = max(x.shape[2] for x in leaves)
    group = max(1, AT_ONCE // (batch * heads * tokens))
    if group >= count or leaves[0].device.type != "cpu":
        return step(carry, *blocks)
    outputs = []
    for i in range(0, count, group):
        part = keras.tree.map_structure(
            lambda x: None if x is None else x[:, :, i : i + group],  # noqa: B023
            blocks,
        )
        carry, output = step(carry, *part)
        outputs.append(output)
    return carry, ops.concatenate(outputs, axis=2)


def by_rows(function, arrays, size):
    """`function` of a few rows of the batch at a time on PyTorch, elsewhere of all.

    Args:
        function: Of arrays, to an array of shape `(B, ...)`.
        arrays: What it takes: pytrees of arrays `(B, ...)` or `(1, ...)`, or `None`.
        size: Numbers that a row makes it hold.

    Returns:
        What `function` gives of all rows.
    """
    if keras.backend.backend() != "torch":
        return function(*arrays)
    leaves = [x for x in keras.tree.flatten(arrays) if x is not None]
    batch, rows = leaves[0].shape[0], max(1, NUMBERS // size)
    is_fit = all(x.device.type == "cpu" and x.shape[0] in (1, batch) for x in leaves)
    if rows >= batch or not is_fit:
        return function(*arrays)

    def some(x, first):
        return x if x is None or x.shape[0] == 1 else x[first : first + rows]

    parts = [
        function(*keras.tree.map_structure(lambda x: some(x, i), arrays))  # noqa: B023
        for i in range(0, batch, rows)
    ]
    return ops.concatenate(parts, axis=0)
