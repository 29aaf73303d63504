"""Products and comparisons at a precision that `keras.ops` does not guarantee.

Keras exposes neither the precision nor the accumulation dtype of a product. Both decide
whether linear attention is correct: an exponent rounded to bfloat16 changes the weight
by a factor, and a running sum in bfloat16 stops growing at 256.
"""

import functools
import math

import keras
from keras import ops

from keras_rfattn.backend.plain import are_values_at_hand, is_plain


def wide_dtype(*arrays):
    """Returns the dtype for sums: float64 if any array has it, else float32."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    """Returns `a @ b`, with operands in their own dtype and sums in float32.

    Args:
        a: Array of shape `(..., i, j)`, or `(..., j, i)` if `transpose_a`.
        b: Array of shape `(..., j, k)`, or `(..., k, j)` if `transpose_b`, with the
            dtype of `a`.
        transpose_a: Whether `a` is given transposed.
        transpose_b: Whether `b` is given transposed.
        is_precise: Whether no operand is rounded, as in `precise_einsum`.

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
        # A single contraction: a separate transpose would be undone again in the
        # gradient.
        rank = len(a.shape)
        lead = tuple(range(rank - 2))
        axes = (
            (rank - 2 if transpose_a else rank - 1,),
            (rank - 1 if transpose_b else rank - 2,),
        )
        precision = jax.lax.Precision.HIGHEST if is_precise else None
        return jax.lax.dot_general(
            a, b, (axes, (lead, lead)), precision, preferred_element_type=dtype
        )
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    if keras.backend.backend() == "torch":
        # PyTorch's exporter to ONNX swaps the wrong axes if they are negative.
        a = a.transpose(a.ndim - 2, a.ndim - 1) if transpose_a else a
        b = b.transpose(b.ndim - 2, b.ndim - 1) if transpose_b else b
        # Keras would convert float64 to float32.
        return a @ b
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    b = ops.swapaxes(b, -1, -2) if transpose_b else b
    return ops.matmul(a, b)


# Keras turns scalars into tensors, and on PyTorch sending one to a GPU waits until the
# GPU has finished all earlier work. The functions below keep Python scalars.


def elementwise_max(a, b):
    """Returns `max(a, b)` in the dtype of `a`; Keras on PyTorch loses float64."""
    if keras.backend.backend() == "torch":
        import torch

        a, b = _tensor(a), _tensor(b)
        return a.clamp(min=b) if _is_number(b) else torch.maximum(a, b.to(a.dtype))
    return ops.maximum(a, b)


def elementwise_min(a, b):
    """Returns `min(a, b)` in the dtype of `a`."""
    if keras.backend.backend() == "torch":
        import torch

        a, b = _tensor(a), _tensor(b)
        return a.clamp(max=b) if _is_number(b) else torch.minimum(a, b.to(a.dtype))
    return ops.minimum(a, b)


def largest_of(x, axis, keepdims=False):
    """Returns `max(x)` over one or several axes; on PyTorch it propagates NaN.

    Keras inspects the result on PyTorch, which would break the graph of `torch.compile`
    at each call.
    """
    if keras.backend.backend() == "torch" and 0 not in x.shape:
        return x.amax(axis, keepdim=keepdims)
    return ops.max(x, axis=axis, keepdims=keepdims)


def smallest_of(x, axis, keepdims=False):
    """Returns `min(x)` over one or several axes; see `largest_of`."""
    if keras.backend.backend() == "torch" and 0 not in x.shape:
        return x.amin(axis, keepdim=keepdims)
    return ops.min(x, axis=axis, keepdims=keepdims)


def repeat_each(x, count, axis=0):
    """Repeats each entry `count` times in a row, along an axis.

    Keras converts `count` to a tensor on PyTorch, and then `torch.compile` cannot know
    the shape of the result.
    """
    if keras.backend.backend() == "torch":
        return _tensor(x).repeat_interleave(count, axis)
    if keras.backend.backend() == "tensorflow" and len(x.shape) > 4:
        # LiteRT tiles arrays of at most five axes, and tiling adds one.
        shape, axis = ops.shape(x), axis % len(x.shape)
        lead, size, tail = shape[:axis], shape[axis], shape[axis + 1 :]
        rows = ops.reshape(x, (math.prod(lead), size, math.prod(tail)))
        return ops.reshape(
            ops.repeat(rows, count, axis=1), (*lead, size * count, *tail)
        )
    return ops.repeat(x, count, axis=axis)


def clip(x, low, high):
    """Returns `x` limited to the range from `low` to `high`, which are numbers."""
    if keras.backend.backend() == "torch":
        return _tensor(x).clamp(low, high)
    return ops.clip(x, low, high)


def where(condition, a, b):
    """Returns `a` where the condition is true, else `b`; `a` or `b` may be a number."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.where(_tensor(condition), _tensor(a), _tensor(b))
    return ops.where(condition, a, b)


def _tensor(x):
    """Returns a PyTorch tensor for an array or variable; numbers are unchanged."""
    import torch

    is_given = isinstance(x, torch.Tensor) or _is_number(x)
    return x if is_given else ops.convert_to_tensor(x)


def _is_number(x):
    return isinstance(x, (int, float))


def exp_of_difference(a, b, is_last=False):
    """Returns `exp(a - b)`, in the shape of `a`.

    PyTorch works in place if possible, because on a CPU fresh memory costs more than
    the arithmetic.

    Args:
        a: Array.
        b: Array that broadcasts to `a`, or `None` for 0.
        is_last: Whether `a` may be overwritten because nothing else uses it.
    """
    if keras.backend.backend() != "torch" or not is_plain(a, b):
        return ops.exp(a if b is None else a - b)
    if b is None:
        return a.exp_() if is_last else a.exp()
    return (a.sub_(b) if is_last else a - b).exp_()


def add_into(x, term):
    """Returns `x + term` in the shape of `x`, which may be overwritten."""
    is_own = keras.backend.backend() == "torch" and is_plain(x, term)
    return x.add_(term) if is_own else x + term


def lower_to(x, limit):
    """Returns `min(x, limit)` for a number `limit`; `x` may be overwritten."""
    if keras.backend.backend() == "torch":
        return x.clamp_(max=limit) if is_plain(x) else x.clamp(max=limit)
    return ops.minimum(x, limit)


def quotient(numerator, denominator, mark, dtype):
    """Returns `numerator / denominator + mark`; the gradient keeps little memory.

    On JAX the gradient keeps only the output and the denominator. Otherwise JAX would
    keep the numerator, which is V float32 numbers for each query.

    Args:
        numerator: Array of shape `(..., V)`.
        denominator: Array of shape `(..., 1)`.
        mark: Array of shape `(..., 1)` of 0 or NaN, or such a number; it makes rows NaN
            that see a token which is not finite.
        dtype: Dtype of the result.
    """
    if keras.backend.backend() == "jax":
        return _quotient()(numerator, denominator, mark, dtype)
    return ops.cast(numerator / denominator + mark, dtype)


@functools.cache
def _quotient():
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
    def divide(numerator, denominator, mark, dtype):
        return (numerator / denominator + mark).astype(dtype)

    # Otherwise JAX would keep what is computed from the output on the way.
    @jax.checkpoint
    def tangent(output, denominator, mark, up, down):
        # A NaN output that nothing reads must not put NaN into the gradient.
        found = jnp.where(jnp.isnan(mark), 0, output).astype(up.dtype)
        return ((up - found * down) / denominator).astype(output.dtype)

    @divide.defjvp
    def gradient(dtype, primals, tangents):
        output = divide(*primals, dtype)
        return output, tangent(output, *primals[1:], *tangents[:2])

    return divide


def precise_einsum(equation, a, b):
    """Computes `einsum` in full float32 precision, where a TPU or GPU would round.

    The result is about to be exponentiated, so its absolute error is the relative error
    of a feature: a TPU's default single bfloat16 pass is off by 0.04 at an exponent of
    10.
    """
    dtype = wide_dtype(a, b)
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    if keras.backend.backend() == "jax":
        import jax
        import jax.numpy as jnp

        # The operand that owns the last axes of the result comes first: then XLA on a
        # CPU writes the result in order instead of transposing it afterwards.
        inputs, output = equation.split("->")
        equation = ",".join(reversed(inputs.split(","))) + "->" + output
        return jnp.einsum(equation, b, a, precision=jax.lax.Precision.HIGHEST)
    return ops.einsum(equation, a, b)


def representable(value):
    """Returns `value` in a dtype that can hold features: float16 becomes float32.

    The smallest float16 number is exp(-17), and features span far more.
    """
    if keras.backend.standardize_dtype(value.dtype) == "float16":
        return ops.cast(value, "float32")
    return value


def known_finite(*arrays, limit):
    """Returns whether all entries are within ±`limit`; `False` if that is costly."""
    if keras.backend.backend() != "torch":
        return False
    if not are_values_at_hand(*arrays):
        return False
    import torch

    ranges = (torch.aminmax(x.detach()) for x in arrays if x.numel())
    return all(-limit < low.item() and high.item() < limit for low, high in ranges)


def known_true(condition):
    """Returns whether all entries are true; `False` if that is costly to know."""
    if keras.backend.backend() != "torch" or not are_values_at_hand(condition):
        return False
    return condition.all().item()
