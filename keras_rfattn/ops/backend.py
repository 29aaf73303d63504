"""The few operations that `keras.ops` does not offer with the contract needed.

Keras exposes neither the precision nor the accumulation type of a product, and
both decide whether linear attention is right: an exponent rounded to bfloat16 is
off by a factor, and a running sum kept in bfloat16 stops growing at 256.
"""

import keras
from keras import ops


def wide_dtype(*arrays):
    """The dtype sums and exponents are kept in: float32, or float64 if any is."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


def accumulated_matmul(a, b):
    """`a @ b` with operands as they are and sums in float32.

    Args:
        a: Array of shape `(..., i, j)`.
        b: Array of shape `(..., j, k)`, of the same dtype as `a`.

    Returns:
        Array of shape `(..., i, k)`, float32 (float64 for float64 operands).
    """
    dtype = wide_dtype(a, b)
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.matmul(a, b, preferred_element_type=dtype)
    return ops.matmul(ops.cast(a, dtype), ops.cast(b, dtype))


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

        return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
    return ops.einsum(equation, a, b)


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
