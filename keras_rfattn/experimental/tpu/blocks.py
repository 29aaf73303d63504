"""Operations of a kernel on a block of queries and a block of keys, in two dimensions.

Rows are queries `(R, ·)`, with G query heads adjacent for each of C tokens, or keys
`(C, ·)`. Features `(·, M)` lie along the lanes, and one number per row has a trailing
axis of 1. The numerator is kept transposed, `(V, M)`.

Features are `exp(x · vectors + bias + term)`, where `term` is one number per token. For
queries it cancels and is left out; for keys it is `LOWEST` where a key is hidden.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_rfattn.ops.features import LOWEST

# The largest excess of a key's exponent over the reference (`reference_of`) that the
# product of a block can hold.
SPAN = 40.0
# The blocks of a sequence run one after the other.
ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


class State(NamedTuple):
    """References to sums over keys: `(1, M)`, `(V, M)` and `(1, M)`.

    In the backward pass they are sums over queries: the numerator sums their gradients,
    and the normalizer what a change of the denominator costs.
    """

    maximum: Any
    numerator: Any
    normalizer: Any


def state_shapes(width, value_dim):
    """Returns the memory shapes of a `State` that a kernel keeps between blocks."""
    shapes = (1, width), (value_dim, width), (1, width)
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def dot(a, b, contract, precision=None):
    """Contracts axis `contract[0]` of a with `contract[1]` of b, in float32."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        a, b, axes, precision=precision, preferred_element_type=jnp.float32
    )


def exponents(x, vectors, bias):
    """Returns exponents `(·, M)` of `(·, H)` in full precision, for `exp` to follow."""
    x = x.astype(jnp.float32)
    return dot(x, vectors, (1, 0), lax.Precision.HIGHEST) + bias


def reset(state):
    """Sets the sums to those of no key."""
    state.maximum[...] = jnp.full(state.maximum.shape, LOWEST, jnp.float32)
    state.numerator[...] = jnp.zeros(state.numerator.shape, jnp.float32)
    state.normalizer[...] = jnp.zeros(state.normalizer.shape, jnp.float32)


def add(state, exponent, rows, weights, among, dtype):
    """Adds `exp(exponent)` of the rows that are `among`, at the running maximum."""
    exponent = jnp.where(among, exponent, LOWEST)
    old = state.maximum[...]
    new = jnp.maximum(old, jnp.max(exponent, axis=0, keepdims=True))
    scale = jnp.exp(old - new)
    features = jnp.where(among, jnp.exp(exponent - new), 0).astype(dtype)
    numerator = dot(rows.astype(dtype), features, (0, 0))
    normalizer = jnp.sum(features.astype(jnp.float32) * weights, axis=0, keepdims=True)
    state.maximum[...] = new
    state.numerator[...] = state.numerator[...] * scale + numerator
    state.normalizer[...] = state.normalizer[...] * scale + normalizer


def rebased(state, reference):
    """Returns the sums relative to a `reference` that is at least their maximum."""
    scale = jnp.exp(state.maximum[...] - reference)
    return state.numerator[...] * scale, state.normalizer[...] * scale


def look_up(features, numerator, normalizer, dtype):
    """Returns what features `(R, M)` read of the sums: `(R, V)` and `(R, 1)`."""
    features = features.astype(dtype)
    found = dot(features, numerator.astype(dtype), (1, 1))
    wide = features.astype(jnp.float32)
    return found, jnp.sum(wide * normalizer, axis=1, keepdims=True)


def divided(numerator, denominator):
    """Returns the quotient; 0 for a row that sees no key."""
    is_seen = denominator > 0
    return jnp.where(is_seen, numerator / jnp.where(is_seen, denominator, 1), 0)


def visible_keys(term):
    """Returns booleans `(C, 1)`, true for visible keys."""
    return term > LOWEST / 2


def reference_of(maximum, exponent, among, first):
    """Returns the maximum `(1, M)` that all queries from token `first` on may use."""
    place = lax.broadcasted_iota(jnp.int32, among.shape, 0)
    earliest = jnp.min(jnp.where(among, place, among.shape[0]))
    row = jnp.where(place == earliest, exponent, LOWEST)
    row = jnp.max(row, axis=0, keepdims=True)
    known = jnp.where(maximum > LOWEST / 2, earliest == first, True)
    return jnp.where(known, jnp.maximum(maximum, row), maximum)


def is_held(exponent, reference, among):
    """Returns whether a product relative to the reference can hold all keys among."""
    excess = jnp.where(among, exponent - reference, LOWEST)
    return jnp.max(excess) <= SPAN


def in_parts(held, size, step, reverse=False):
    """Calls `step(first, last)` for the whole block if `held`, else token by token."""
    count = jnp.where(held, 1, size)
    length = jnp.where(held, size, 1)

    def one(i, _):
        i = count - 1 - i if reverse else i
        step(i * length, (i + 1) * length)
        return 0

    lax.fori_loop(0, count, one, 0)


def within(size, first, last, groups=1):
    """Returns booleans `(size, 1)`: rows of tokens `first <= i < last`, G for each."""
    row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= first * groups) & (row < last * groups)


def past(rows, keys, groups):
    """Returns booleans `(R, C)`: keys up to a row's own token."""
    row = lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
    return row >= column * groups


def at_start(function):
    """Calls `function` at the first block of a sequence."""
    pl.when(pl.program_id(2) == 0)(function)


def clear(*refs):
    """Sets the references to 0."""
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def backward(x, slope, vectors, of_vectors, of_bias):
    """Returns the gradient of tokens, and adds to those of their vectors and bias."""
    of_vectors[...] += dot(x[...].astype(jnp.float32), slope, (0, 0))
    of_bias[...] += jnp.sum(slope, axis=0, keepdims=True)
    return dot(slope, vectors[...], (1, 1))


def backward_of_queries(gradient, delta, numerator, normalizer, dtype):
    """Returns the gradient `(R, M)` of features that read sums over keys."""
    slope = dot(gradient.astype(dtype), numerator.astype(dtype), (1, 0))
    return slope - delta * normalizer


def backward_of_keys(exponent, value, among, seen):
    """Returns the gradients of values and exponents of the keys that are `among`."""
    features = jnp.where(among, jnp.exp(exponent + seen.maximum[...]), 0)
    of_output = seen.numerator[...].astype(value.dtype)
    slope = features * (dot(value, of_output, (1, 0)) - seen.normalizer[...])
    return dot(features.astype(value.dtype), of_output, (1, 1)), slope


def block(size, width):
    """Returns the spec of a block of `(B, K, ·, width)` at a grid step."""
    return pl.BlockSpec((None, None, size, width), lambda b, k, i: (b, k, i, 0))


def whole(x):
    """Returns the spec of all rows of a head in `(B or 1, K, ·, ·)`, at every step."""
    rows, last = x.shape[2:]
    is_shared = x.shape[0] == 1
    return pl.BlockSpec(
        (None, None, rows, last), lambda b, k, i: (0 if is_shared else b, k, 0, 0)
    )


def float32(*shape):
    """Returns the shape of a float32 output."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def summed_to(gradient, like):
    """Returns a gradient in the shape and dtype of its input, summed if shared."""
    if gradient.shape[0] != like.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(like.dtype)
