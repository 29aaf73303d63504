"""The operations of this folder for any backend, written with `keras.ops`.

`jax.py`, `tensorflow.py` and `torch.py` redefine those that need another form on their
backend. Comments say why Keras' own operations do not serve there.
"""

import contextlib

import keras
from keras import ops

from keras_rfattn.backend.sizes import is_known

# Number of tokens in a block of causal attention, by device. A CPU does the least work
# with short blocks. A TPU is faster with few long steps, and keeps the sums of each.
BLOCK_SIZES, DEFAULT_BLOCK_SIZE = {"cpu": 64, "tpu": 512}, 128


def wide_dtype(*arrays):
    """Returns the dtype for sums: float64 if any array has it, else float32."""
    names = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in names else "float32"


def representable(value):
    """Returns `value` in a dtype that can hold features: float16 becomes float32."""
    if keras.backend.standardize_dtype(value.dtype) == "float16":
        return ops.cast(value, "float32")
    return value


# --- Products


# Keras rounds sums of bfloat16, and JAX needs the transposes in the product.
def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    """Returns `a @ b`, with operands in their own dtype and sums in float32."""
    dtype = wide_dtype(a, b)
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    a = ops.swapaxes(a, -1, -2) if transpose_a else a
    b = ops.swapaxes(b, -1, -2) if transpose_b else b
    return ops.matmul(a, b)


# XLA on a CPU needs another order of operands, and a TPU the precision by name.
def precise_einsum(equation, a, b):
    """Computes `einsum` in full float32 precision, where a TPU or GPU would round."""
    dtype = wide_dtype(a, b)
    return ops.einsum(equation, ops.cast(a, dtype), ops.cast(b, dtype))


# PyTorch adds the terms in place.
def affine(x, vectors, *terms):
    """Returns `x @ vectors` plus terms that broadcast to it, in full precision."""
    result = accumulated_matmul(x, ops.cast(vectors, x.dtype), is_precise=True)
    for term in terms:
        result = result + ops.cast(term, result.dtype)
    return result


# JAX would keep more arrays for the gradient.
def quotient(numerator, denominator, dtype):
    """Returns `numerator / denominator` in a dtype."""
    return ops.cast(numerator / denominator, dtype)


# --- Elementwise operations and reductions

# Of `elementwise_*`, `clip` and `where`: Keras turns a number into an array of PyTorch,
# and sending it to a GPU waits for all earlier work.


def elementwise_max(a, b):
    """Returns `max(a, b)` in the dtype of `a`; `b` may be a number."""
    return ops.maximum(a, b)


def elementwise_min(a, b):
    """Returns `min(a, b)` in the dtype of `a`; `b` may be a number."""
    return ops.minimum(a, b)


# Of `largest_of` and `smallest_of`: Keras reads the result, which breaks the graph of
# `torch.compile`.


def largest_of(x, axis, keepdims=False):
    """Returns `max(x)` over one or several axes."""
    return ops.max(x, axis=axis, keepdims=keepdims)


def smallest_of(x, axis, keepdims=False):
    """Returns `min(x)` over one or several axes."""
    return ops.min(x, axis=axis, keepdims=keepdims)


def clip(x, low, high):
    """Returns `x` limited to the range from `low` to `high`, which are numbers."""
    return ops.clip(x, low, high)


def where(condition, a, b):
    """Returns `a` where the condition is true, else `b`; `a` or `b` may be a number."""
    return ops.where(condition, a, b)


# Of `*_into`: PyTorch on a CPU overwrites, as fresh memory costs more than arithmetic.


def exp_into(a, b):
    """Returns `exp(a - b)` in the shape of `a`, which may be overwritten."""
    return ops.exp(a - b)


def add_into(a, b):
    """Returns `a + b` in the shape of `a`, which may be overwritten."""
    return a + b


# Each backend has a form with fewer passes over the array.
def finite_tokens(x):
    """Returns which tokens are finite in all entries: `(..., H)` to `(..., 1)`."""
    x = ops.abs(ops.stop_gradient(x))
    return ops.all(x < float("inf"), axis=-1, keepdims=True)


# JAX and PyTorch would compare all entries again for the gradient.
def bounded(x, finite, limit):
    """Returns tokens within ±`limit`, and 0 for those that are not `finite`."""
    return where(finite, clip(x, -limit, limit), 0)


# --- Moving entries


# LiteRT repeats arrays of at most five axes, and `torch.compile` needs a plain count.
def repeat_each(x, count, axis=0):
    """Repeats each entry `count` times in a row, along an axis."""
    return ops.repeat(x, count, axis=axis)


# PyTorch's split has one array as its gradient, two slices have two.
def last_apart(x, axis=-1):
    """Splits `(..., V + 1)` into `(..., V)` and `(...)`, along axis -1 or -2."""
    if axis == -2:
        return x[..., :-1, :], x[..., -1, :]
    return x[..., :-1], x[..., -1]


# PyTorch copies whole tokens, and TensorFlow allows a batch of unknown size.
def take_tokens(x, index):
    """Gathers the tokens `index` `(B, L)` from x: `(B, T, ...)` to `(B, L, ...)`."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(x.shape) - 2)))
    return ops.take_along_axis(x, index, axis=1)


# PyTorch does not know the size of a slice of an array of unknown size.
def leading(x, length, axis):
    """Returns the first `length` entries of an array along an axis."""
    return x[(slice(None),) * axis + (slice(length),)]


# LiteRT joins arrays of at most five axes.
def shifted(blocks, offset):
    """Returns blocks along axis 2; block i is the former block `i + offset`."""
    if offset == 0:
        return blocks
    zeros = ops.zeros_like(blocks[:, :, : abs(offset)])
    if offset < 0:
        return ops.concatenate([zeros, blocks[:, :, :offset]], axis=2)
    return ops.concatenate([blocks[:, :, offset:], zeros], axis=2)


def num_blocks(length, size):
    """Returns how many blocks of `size` hold `length` tokens, at least one."""
    if is_known(length):
        return max(-(-length // size), 1)
    return (length + (size - 1)) // size


# --- What may be known about arrays now (Keras has no such operations)


def is_plain(*arrays):
    """Returns whether the values of arrays may be read, which a trace forbids."""
    return True


def known_finite(*arrays, limit):
    """Returns whether all entries are within ±`limit`; `False` if that is costly."""
    return False


def known_true(condition):
    """Returns whether all entries are true; `False` if that is costly to know."""
    return False


def default_block_size():
    """Returns the number of tokens in a block of causal attention on this device."""
    return DEFAULT_BLOCK_SIZE


# --- Programs, loops and gradients


def compiled(function, /, **options):
    """Returns `function` with its `options` set, compiled once for each input shape."""
    return lambda *arrays: function(*arrays, **options)


def loops_over_blocks(count):
    """Returns whether prefix sums over `count` blocks should be a loop."""
    return True


# On a GPU, the steps of `ops.scan` cost more than all of them at once.
def exclusive_scan(combine, start, elements):
    """Folds `elements` along axis 0, and returns the carry before each of them."""
    if elements[0].shape[0] == 1:
        after = combine(start, tuple(x[0] for x in elements))
        return after, tuple(x[None] for x in start)
    return ops.scan(lambda carry, x: (combine(carry, x), carry), start, elements)


def scan_by_doubling(combine, start, elements):
    """Computes `exclusive_scan` in log2(n) steps, each over all elements at once."""
    both = zip(start, elements, strict=True)
    sums, distance = [ops.concatenate([a[None], b], 0) for a, b in both], 1
    while distance < sums[0].shape[0]:
        parts = (x[:-distance] for x in sums), (x[distance:] for x in sums)
        both = zip(sums, combine(*map(tuple, parts)), strict=True)
        sums = [ops.concatenate([x[:distance], y], 0) for x, y in both]
        distance *= 2
    return tuple(x[-1] for x in sums), tuple(x[:-1] for x in sums)


def fold(step, carry, blocks):
    """Runs `step` over blocks, one at a time where that saves memory and time."""
    return step(carry, *blocks)


def by_heads(function, arrays, size, are_weights=False):
    """Applies `function` to a few heads at a time if a CPU's cache cannot hold all."""
    return function(*arrays)


def heads_at_once(arrays, size, limit):
    """Returns how many heads of `size` floats a limit holds, and how many there are."""
    leaves = [x for x in keras.tree.flatten(arrays) if x is not None]
    count = max(x.shape[1] for x in leaves)
    most = max(1, limit // max(size, 1))
    return max(i for i in range(1, count + 1) if count % i == 0 and i <= most), count


# PyTorch cannot read the condition in a program, and JAX would keep all residuals.
def run_if(condition, function, otherwise, operands):
    """Returns `function(*operands)` if the boolean scalar holds, else zeros."""
    return ops.cond(
        condition,
        lambda: function(*operands),
        lambda: tuple(ops.zeros_like(x) for x in otherwise),
    )


# `ops.dot_product_attention` has no answer for rows that see no key.
def fused_softmax(query, key, value, visible, is_causal):
    """Returns softmax attention by an operation of the backend, or `None`."""
    return None


def without_gradients():
    """Returns a context manager under which nothing is kept for a gradient."""
    return contextlib.nullcontext()


def with_gradient(function, variables, tensors):
    """Returns `function(*tensors)`; only its first result can be differentiated."""
    return function(*tensors)


def kept(owner, settings, arrays, function):
    """Returns `function(settings, arrays)`, kept where changes of arrays are known."""
    return function(settings, arrays)
