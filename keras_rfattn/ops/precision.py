"""Products and comparisons at the precision that `keras.ops` does not promise.

Keras exposes neither the precision nor the accumulation type of a product, and
both decide whether linear attention is right: an exponent rounded to bfloat16 is
off by a factor, and a running sum kept in bfloat16 stops growing at 256.
"""

import functools
import math

import keras
from keras import ops

from keras_rfattn.ops.plain import are_values_at_hand
from keras_rfattn.ops.plain import is_plain


def wide_dtype(*arrays):
    """The dtype sums and exponents are kept in: float32, or float64 if any is."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    """`a @ b` with operands as they are and sums in float32.

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
        # One contraction: a transpose before it would be undone in the gradient.
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
        # Keras would make float32 of float64.
        return a @ b
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    b = ops.swapaxes(b, -1, -2) if transpose_b else b
    return ops.matmul(a, b)


# Of a number Keras makes a tensor, and to send one to a GPU PyTorch waits for all that
# it has begun there. These four leave numbers be.


def elementwise_max(a, b):
    """`max(a, b)` in the dtype of `a`: Keras on PyTorch turns float64 into float32."""
    if keras.backend.backend() == "torch":
        import torch

        a, b = _tensor(a), _tensor(b)
        return a.clamp(min=b) if _is_number(b) else torch.maximum(a, b.to(a.dtype))
    return ops.maximum(a, b)


def elementwise_min(a, b):
    """`min(a, b)` in the dtype of `a`."""
    if keras.backend.backend() == "torch":
        import torch

        a, b = _tensor(a), _tensor(b)
        return a.clamp(max=b) if _is_number(b) else torch.minimum(a, b.to(a.dtype))
    return ops.minimum(a, b)


def largest_of(x, axis, keepdims=False):
    """`max(x)` over an axis, or several; NaN if an entry is, on PyTorch.

    Where Keras asks what PyTorch has returned, `torch.compile` would begin a program
    anew at each.
    """
    if keras.backend.backend() == "torch" and 0 not in x.shape:
        return x.amax(axis, keepdim=keepdims)
    return ops.max(x, axis=axis, keepdims=keepdims)


def smallest_of(x, axis, keepdims=False):
    """`min(x)` over an axis, or several, as `largest_of`."""
    if keras.backend.backend() == "torch" and 0 not in x.shape:
        return x.amin(axis, keepdim=keepdims)
    return ops.min(x, axis=axis, keepdims=keepdims)


def repeat_each(x, count, axis=0):
    """Each entry `count` times in a row, along an axis.

    Keras makes a tensor of the number on PyTorch, and then `torch.compile` cannot know
    the shape of the result.
    """
    if keras.backend.backend() == "torch":
        return _tensor(x).repeat_interleave(count, axis)
    if keras.backend.backend() == "tensorflow" and len(x.shape) > 4:
        # LiteRT tiles arrays of five axes at most, and one is added to tile.
        shape, axis = ops.shape(x), axis % len(x.shape)
        lead, size, tail = shape[:axis], shape[axis], shape[axis + 1 :]
        rows = ops.reshape(x, (math.prod(lead), size, math.prod(tail)))
        return ops.reshape(
            ops.repeat(rows, count, axis=1), (*lead, size * count, *tail)
        )
    return ops.repeat(x, count, axis=axis)


def clip(x, low, high):
    """`x` within two numbers."""
    if keras.backend.backend() == "torch":
        return _tensor(x).clamp(low, high)
    return ops.clip(x, low, high)


def where(condition, a, b):
    """`a` where the condition is true, `b` elsewhere; one or both are numbers."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.where(_tensor(condition), _tensor(a), _tensor(b))
    return ops.where(condition, a, b)


def _tensor(x):
    """Of PyTorch, of an array or a variable; a number stays one."""
    import torch

    is_given = isinstance(x, torch.Tensor) or _is_number(x)
    return x if is_given else ops.convert_to_tensor(x)


def _is_number(x):
    return isinstance(x, (int, float))


def exp_of_difference(a, b, is_last=False):
    """`exp(a - b)`, of the shape of a.

    On PyTorch in place where that can be: fresh memory costs a CPU more than the sum.

    Args:
        a: Array.
        b: Array, or `None` for 0.
        is_last: Whether nothing else holds `a`.
    """
    if keras.backend.backend() != "torch" or not is_plain(a, b):
        return ops.exp(a if b is None else a - b)
    if b is None:
        return a.exp_() if is_last else a.exp()
    return (a.sub_(b) if is_last else a - b).exp_()


def add_into(x, term):
    """`x + term` of the shape of x, an array that is not used again."""
    is_own = keras.backend.backend() == "torch" and is_plain(x, term)
    return x.add_(term) if is_own else x + term


def lower_to(x, limit):
    """`min(x, limit)`, a number, of an array that is not used again."""
    if keras.backend.backend() == "torch":
        return x.clamp_(max=limit) if is_plain(x) else x.clamp(max=limit)
    return ops.minimum(x, limit)


def quotient(numerator, denominator, mark, dtype):
    """`numerator / denominator + mark`; a gradient keeps that, and the denominator.

    Of V float32 numbers a query, which numerators are, JAX would keep all.

    Args:
        numerator: Array of shape `(..., V)`.
        denominator: Array of shape `(..., 1)`.
        mark: 0 or NaN, `(..., 1)`, or such a number.
        dtype: Of the result.
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

    # Else what is made of the output on the way would be kept instead.
    @jax.checkpoint
    def tangent(output, denominator, mark, up, down):
        # A NaN that nothing reads leaves no NaN in the gradient.
        found = jnp.where(jnp.isnan(mark), 0, output).astype(up.dtype)
        return ((up - found * down) / denominator).astype(output.dtype)

    @divide.defjvp
    def gradient(dtype, primals, tangents):
        output = divide(*primals, dtype)
        return output, tangent(output, *primals[1:], *tangents[:2])

    return divide


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


def representable(value):
    """`value` in a dtype that can hold features beside it: float16 as float32.

    float16's smallest number is exp(-17), and features span far more.
    """
    if keras.backend.standardize_dtype(value.dtype) == "float16":
        return ops.cast(value, "float32")
    return value


def known_finite(*arrays, limit):
    """Whether all entries are within a limit; only where that is cheap to ask."""
    if keras.backend.backend() != "torch":
        return False
    if not are_values_at_hand(*arrays):
        return False
    import torch

    ranges = (torch.aminmax(x.detach()) for x in arrays if x.numel())
    return all(-limit < low.item() and high.item() < limit for low, high in ranges)


def known_true(condition):
    """Whether all are true; only where that is cheap to ask, else `False`."""
    if keras.backend.backend() != "torch" or not are_values_at_hand(condition):
        return False
    return condition.all().item()
