"""Loops over blocks, and programs compiled once, that `keras.ops` does not offer."""

import functools

import keras
from keras import ops

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
    TensorFlow and PyTorch would pay for a loop operation by operation, and take
    all blocks in one step.

    Args:
        step: `(carry, *blocks) -> (carry, output)` of any number of blocks.
        carry: Tuple of arrays.
        blocks: Pytrees of arrays of shape `(B, K, n, ...)`.

    Returns:
        `(carry, output)`, the output of shape `(B, K, n, ...)`.
    """
    if keras.backend.backend() != "jax":
        return step(carry, *blocks)
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
