"""The few operations that `keras.ops` does not offer with the contract needed.

Keras exposes neither the precision nor the accumulation type of a product, and
both decide whether linear attention is right: an exponent rounded to bfloat16 is
off by a factor, and a running sum kept in bfloat16 stops growing at 256.
"""

import functools

import keras
from keras import ops

KEPT = "keras_rfattn"


def wide_dtype(*arrays):
    """The dtype sums and exponents are kept in: float32, or float64 if any is."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


def accumulated_matmul(a, b, transpose_a=False, transpose_b=False):
    """`a @ b` with operands as they are and sums in float32.

    Args:
        a: Array of shape `(..., i, j)`, or `(..., j, i)` if `transpose_a`.
        b: Array of shape `(..., j, k)`, or `(..., k, j)` if `transpose_b`, with the
            dtype of `a`.
        transpose_a: Whether `a` is given transposed.
        transpose_b: Whether `b` is given transposed.

    Returns:
        Array of shape `(..., i, k)`, float32 (float64 for float64 operands).
    """
    dtype = wide_dtype(a, b)
    if keras.backend.backend() == "jax":
        import jax
        import jax.numpy as jnp

        shape = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a = jnp.broadcast_to(a, (*shape, *a.shape[-2:]))
        b = jnp.broadcast_to(b, (*shape, *b.shape[-2:]))
        # One contraction: a transpose before it would be undone in the gradient.
        rank = len(a.shape)
        lead = tuple(range(rank - 2))
        axes = (
            (rank - 2 if transpose_a else rank - 1,),
            (rank - 1 if transpose_b else rank - 2,),
        )
        return jax.lax.dot_general(
            a, b, (axes, (lead, lead)), preferred_element_type=dtype
        )
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    b = ops.swapaxes(b, -1, -2) if transpose_b else b
    if keras.backend.backend() == "torch":
        # Keras would make float32 of float64.
        return a @ b
    return ops.matmul(a, b)


def elementwise_max(a, b):
    """`max(a, b)` in the dtype of `a`: Keras on PyTorch turns float64 into float32."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))
    return ops.maximum(a, b)


def elementwise_min(a, b):
    """`min(a, b)` in the dtype of `a`."""
    return -elementwise_max(-a, -b)


def precise_einsum(equation, a, b):
    """`einsum` at full float32 precision, also where a TPU or GPU would round.

    The result is about to be exponentiated, so its absolute error is the
    relative error of a feature: a TPU's default single bfloat16 pass is off by
    0.04 at an exponent of 10.
    """
    dtype = wide_dtype(a, b)
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    if keras.backend.backend() == "jax":
        import jax
        import jax.numpy as jnp

        # The operand with the free axes of the result's end comes first: XLA on a
        # CPU then writes the result in order instead of transposing it afterwards.
        inputs, output = equation.split("->")
        equation = ",".join(reversed(inputs.split(","))) + "->" + output
        return jnp.einsum(equation, b, a, precision=jax.lax.Precision.HIGHEST)
    return ops.einsum(equation, a, b)


def take_tokens(x, index):
    """The tokens `index` `(B, L)` of each row of x, `(B, T, ...)` to `(B, L, ...)`."""
    if keras.backend.backend() == "tensorflow":
        # Keras' way takes a batch of unknown size to be at least 1.
        import tensorflow as tf

        return tf.gather(x, index, axis=1, batch_dims=1)
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(x.shape) - 2)))
    return ops.take_along_axis(x, index, axis=1)


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
