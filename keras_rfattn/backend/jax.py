"""The operations that JAX needs in another form than `common` gives them."""

import functools

import jax
import jax.numpy as jnp
import keras
from keras import ops

from keras_rfattn.backend import common
from keras_rfattn.backend.common import wide_dtype
from keras_rfattn.backend.sizes import heads_at_once, is_known, product

# Number of features, and of weights, that `by_heads` takes at once on a CPU. They fit a
# cache. Weights are read twice and features more often.
FEATURES, WEIGHTS = 2**18, 2**21
# Number of tokens times heads that `fold` takes at once on a GPU, where a step is many
# small kernels. They take some GiB of memory.
TOKENS_ON_GPU = 2**19


def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    shape = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*shape, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*shape, *b.shape[-2:]))
    # A single contraction: a separate transpose would be undone again in the gradient.
    rank = len(a.shape)
    lead = tuple(range(rank - 2))
    axes = (
        (rank - 2 if transpose_a else rank - 1,),
        (rank - 1 if transpose_b else rank - 2,),
    )
    precision = jax.lax.Precision.HIGHEST if is_precise else None
    return jax.lax.dot_general(
        a, b, (axes, (lead, lead)), precision, preferred_element_type=wide_dtype(a, b)
    )


def precise_einsum(equation, a, b):
    dtype = wide_dtype(a, b)
    # The operand that owns the last axes of the result comes first: then XLA on a CPU
    # writes the result in order instead of transposing it afterwards.
    inputs, output = equation.split("->")
    equation = ",".join(reversed(inputs.split(","))) + "->" + output
    a, b = ops.cast(a, dtype), ops.cast(b, dtype)
    return jnp.einsum(equation, b, a, precision=jax.lax.Precision.HIGHEST)


def is_plain(*arrays):
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def finite_tokens(x):
    if jax.default_backend() != "cpu":
        return common.finite_tokens(x)
    # Finite numbers times 0 are 0, others are NaN. This product is XLA's fastest sum
    # over a token on a CPU.
    zeros = jnp.zeros((x.shape[-1], 1), dtype=x.dtype)
    return jnp.matmul(jax.lax.stop_gradient(x), zeros) == 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def bounded(x, finite, limit):
    return common.bounded(x, finite, limit)


@bounded.defjvp
def _bounded_jvp(limit, primals, tangents):
    # No row that the loss reads sees a token that changes, or the loss is NaN.
    return bounded(*primals, limit), tangents[0]


def take_tokens(x, index):
    # Keras' way computes which indices are in bounds.
    def take(x, index):
        at = x.at[index]
        return at.get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(take)(x, jnp.broadcast_to(index, (x.shape[0], index.shape[1])))


def default_block_size():
    return common.BLOCK_SIZES.get(jax.default_backend(), common.DEFAULT_BLOCK_SIZE)


def compiled(function, /, **options):
    return functools.partial(_call, function, tuple(options.items()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(function, options, *arrays):
    return function(*arrays, **dict(options))


def fold(step, carry, blocks):
    """Loops over blocks; the gradient computes a block again and keeps none of it."""
    leaves = [x for x in jax.tree.leaves(blocks) if x is not None]
    count = leaves[0].shape[2]
    sizes = [product(*x.shape[:2], *x.shape[3:-1]) for x in leaves]
    each = 1
    if _is_on_gpu() and is_known(count) and None not in sizes:
        most = min(count, max(1, TOKENS_ON_GPU // max(sizes)))
        each = next(i for i in range(most, 0, -1) if count % i == 0)

    def split(x):
        shape = *x.shape[:2], count // each, each, *x.shape[3:]
        return jnp.moveaxis(x.reshape(shape), 2, 0)

    def joined(x):
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], count, *x.shape[4:])

    # XLA cannot merge the two computations of a block if they are in loops of several
    # steps. Forbidding it to do so makes compiling slower.
    one = jax.checkpoint(
        lambda carry, some: step(carry, *some), prevent_cse=count == each
    )
    carry, results = jax.lax.scan(one, carry, jax.tree.map(split, blocks))
    return carry, jax.tree.map(joined, results)


def by_heads(function, arrays, size, are_weights=False):
    # With a distribution the heads may be on several devices.
    if size is None or keras.distribution.distribution() is not None:
        return function(*arrays)
    heads, count = heads_at_once(arrays, size, WEIGHTS if are_weights else FEATURES)
    if heads == count:
        return function(*arrays)
    return compiled(_heads_in_turn, function=function, heads=heads)(arrays)


def _heads_in_turn(arrays, function, heads):
    """Computes `by_heads`; the gradient keeps, and takes, all heads at once."""

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

        parts = jax.lax.map(some, jnp.arange(0, count, heads))
        parts = jnp.moveaxis(parts, 0, 1)
        return parts.reshape(parts.shape[0], count, *parts.shape[3:])

    @jax.custom_jvp
    def attend(arrays):
        return jax.lax.platform_dependent(arrays, cpu=in_turn, default=at_once)

    @attend.defjvp
    def gradient(primals, tangents):
        return jax.jvp(at_once, primals, tangents)

    return attend(arrays)


def run_if(condition, function, otherwise, operands):
    # Otherwise JAX would keep the residuals of the branch even where it does not run.
    return common.run_if(
        condition, jax.checkpoint(function, prevent_cse=False), otherwise, operands
    )


def _is_on_gpu():
    """Returns whether a loop on this device costs more than all its steps at once."""
    return jax.default_backend() == "gpu"
