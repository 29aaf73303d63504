"""The operations of this folder for any backend, written with `keras.ops`.

`jax.py`, `tensorflow.py` and `torch.py` redefine those that need another form on their
backend. The comment above each says why Keras' own operations do not serve.
"""

import contextlib

import keras
from keras import ops

from keras_rfattn.backend.sizes import is_known

# Number of tokens in a block of causal attention, by device. A CPU does the least work
# with short blocks. A TPU is faster with few long steps, and keeps the sums of each.
BLOCK_SIZES, DEFAULT_BLOCK_SIZE = {"cpu": 64, "tpu": 512}, 128

# --- Dtypes and numbers


# Keras' rule for mixed dtypes keeps bfloat16, in which a sum of ones stops at 256.
def wide_dtype(*arrays):
    """Returns the dtype for sums: float64 if any array has it, else float32."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


# Keras has no dtype for what float16 would overflow.
def representable(value):
    """Returns `value` in a dtype that can hold features: float16 becomes float32."""
    if keras.backend.standardize_dtype(value.dtype) == "float16":
        return ops.cast(value, "float32")
    return value


# On PyTorch, Keras makes arrays of numbers, which a GPU waits for, and rounds float64.
def clip(x, low=None, high=None):
    """Returns `x` in its dtype, limited by numbers or arrays; `None` is no limit."""
    x = x if low is None else ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


# On PyTorch, Keras makes arrays of numbers, as in `clip`.
def where(condition, a, b):
    """Returns `a` where the condition is true, else `b`; `a` or `b` may be a number."""
    return ops.where(condition, a, b)


# --- Products


# `ops.matmul` rounds sums of bfloat16, and JAX needs the transposes in the product.
def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    """Returns `a @ b`, with operands in their own dtype and sums in float32."""
    dtype = wide_dtype(a, b)
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    b = ops.swapaxes(b, -1, -2) if transpose_b else b
    return ops.matmul(a, b)


# `ops.einsum` rounds on a TPU, and XLA on a CPU needs another order of operands.
def precise_einsum(equation, a, b):
    """Computes `einsum` in full float32 precision, where a TPU or GPU would round."""
    dtype = wide_dtype(a, b)
    return ops.einsum(equation, ops.cast(a, dtype), ops.cast(b, dtype))


# `ops.dot_product_attention` has no answer for rows that see no key.
def fused_softmax(query, key, value, visible, is_causal):
    """Returns softmax attention by an operation of the backend, or `None`."""
    return None


# --- Tokens and blocks


# Each backend has a form with fewer passes over the array than `ops.isfinite`.
def finite_tokens(x):
    """Returns which tokens are finite in all entries: `(..., H)` to `(..., 1)`."""
    x = ops.abs(ops.stop_gradient(x))
    return ops.all(x < float("inf"), axis=-1, keepdims=True)


# JAX and PyTorch would compare all entries again for the gradient.
def bounded(x, finite, limit):
    """Returns tokens within ±`limit`, and 0 for those that are not `finite`."""
    return where(finite, clip(x, -limit, limit), 0)


# PyTorch copies whole tokens, and TensorFlow allows a batch of unknown size.
def take_tokens(x, index):
    """Gathers the tokens `index` `(B, L)` from x: `(B, T, ...)` to `(B, L, ...)`."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(x.shape) - 2)))
    return ops.take_along_axis(x, index, axis=1)


# Keras leaves to the backend what a program for any length may do with a size.
def num_blocks(length, size):
    """Returns how many blocks of `size` hold `length` tokens, at least one."""
    if is_known(length):
        return max(-(-length // size), 1)
    return (length + (size - 1)) // size


# --- What may be known about arrays now


# Keras does not say whether it traces a program.
def is_plain(*arrays):
    """Returns whether the values of arrays may be read, which a trace forbids."""
    return True


# Keras has no test that depends on its cost.
def known_finite(*arrays, limit):
    """Returns whether all entries are within ±`limit`; `False` if that is costly."""
    return False


# Keras has no test that depends on its cost.
def known_true(condition):
    """Returns whether all entries are true; `False` if that is costly to know."""
    return False


# Keras does not name the device of a computation.
def default_block_size():
    """Returns the number of tokens in a block of causal attention on this device."""
    return DEFAULT_BLOCK_SIZE


# --- Programs, loops and gradients


# Keras compiles steps of whole models only.
def compiled(function, /, **options):
    """Returns `function` with its `options` set, compiled once for each input shape."""
    return lambda *arrays: function(*arrays, **options)


# `ops.scan` keeps what each step computed, for the gradient.
def fold(step, carry, blocks):
    """Runs `step` over blocks, one at a time where that saves memory and time."""
    return step(carry, *blocks)


# `ops.map` copies its arrays, and takes one entry at a time.
def by_heads(function, arrays, size, are_weights=False):
    """Applies `function` to a few heads at a time if a CPU's cache cannot hold all."""
    return function(*arrays)


# PyTorch cannot read the condition of `ops.cond` in a program; JAX keeps residuals.
def run_if(condition, function, otherwise, operands):
    """Returns `function(*operands)` if the boolean scalar holds, else zeros."""
    return ops.cond(
        condition,
        lambda: function(*operands),
        lambda: tuple(ops.zeros_like(x) for x in otherwise),
    )


# Keras stops the gradient of single arrays only.
def without_gradients():
    """Returns a context manager under which nothing is kept for a gradient."""
    return contextlib.nullcontext()


# `ops.custom_gradient` cannot compute a gradient before it is asked for.
def with_gradient(function, variables, tensors):
    """Returns `function(*tensors)`; only its first result can be differentiated."""
    return function(*tensors)


# Keras does not count the changes of its variables.
def kept(owner, settings, arrays, function):
    """Returns `function(settings, arrays)`, kept where changes of arrays are known."""
    return function(settings, arrays)
