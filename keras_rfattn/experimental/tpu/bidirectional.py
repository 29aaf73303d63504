"""Attention without causality as two kernels: one sums the keys, one reads the sums."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_rfattn.experimental.tpu.blocks import (
    ORDER,
    State,
    add,
    at_start,
    backward,
    backward_of_keys,
    backward_of_queries,
    block,
    clear,
    divided,
    exponents,
    float32,
    look_up,
    reset,
    summed_to,
    visible_keys,
    whole,
)
from keras_rfattn.experimental.tpu.passes import Columns, Rows
from keras_rfattn.ops.features import LOWEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def bidirectional(rows, columns, parameters, size):
    """Computes linear attention by exponential features, without causality.

    The arguments are those of `causal`, but queries and keys may have different
    lengths, each a multiple of `size`.
    """
    return _save(rows, columns, parameters, size)[0]


def _call(kernel, size, cut, whole_inputs, out_tokens, out_shared):
    """Runs a kernel over blocks of the arrays `cut`; others are whole at every step."""
    batch, heads, length = cut[0].shape[:3]
    return pl.pallas_call(
        kernel, grid=(batch, heads, length // size),
        in_specs=[*(block(size, x.shape[-1]) for x in cut), *map(whole, whole_inputs)],
        out_specs=[
            *(block(size, x.shape[-1]) for x in out_tokens), *map(whole, out_shared)
        ],
        out_shape=[*out_tokens, *out_shared], compiler_params=ORDER,
    )(*cut, *whole_inputs)  # fmt: skip


def _save(rows, columns, parameters, size):
    """Returns the result of `bidirectional`, and what `_gradient` needs."""
    query, (key, _, value, term) = rows.query, columns
    query_vectors, key_vectors, query_bias, key_bias = parameters
    state = _call(
        _sum_kernel, size, (key, value, term), (key_vectors, key_bias), [],
        _sums(key, key_vectors, value),
    )  # fmt: skip
    output, shift, denominator = _call(
        functools.partial(_read_kernel, dtype=value.dtype), size, (query,),
        (query_vectors, query_bias, *state),
        [float32(*query.shape[:3], n) for n in (value.shape[-1], 1, 1)], [],
    )  # fmt: skip
    return output, (rows, columns, parameters, output, shift, denominator, state)


def _sums(key, vectors, value):
    """Returns the shapes of a `State` as outputs."""
    lengths = 1, value.shape[-1], 1
    return [float32(*key.shape[:2], n, vectors.shape[-1]) for n in lengths]


def _sum_kernel(key, value, term, vectors, bias, *state):
    state = State(*state)
    at_start(lambda: reset(state))
    keys = exponents(key[...], vectors[...], bias[...]) + term[...]
    add(state, keys, value[...], 1.0, visible_keys(term[...]), value.dtype)


def _read_kernel(query, vectors, bias, maximum, numerator, normalizer, output, shift,
                 denominator, *, dtype):  # fmt: skip
    lifted = exponents(query[...], vectors[...], bias[...]) + maximum[...]
    shift[...] = jnp.max(lifted, axis=1, keepdims=True)
    features = jnp.exp(lifted - shift[...])
    found, total = look_up(features, numerator[...], normalizer[...], dtype)
    output[...], denominator[...] = divided(found, total), total


def _gradient(size, saved, gradient):
    """Returns the gradients of all arrays that `bidirectional` takes."""
    rows, columns, parameters, output, shift, denominator, state = saved
    query, (key, _, value, term) = rows.query, columns
    gradient = divided(gradient, denominator)
    delta = jnp.sum(gradient * output, axis=-1, keepdims=True)
    shared = [float32(*query.shape[:2], *x.shape[2:]) for x in parameters]
    of_query, of_query_vectors, of_query_bias, *seen = _call(
        functools.partial(_query_kernel, dtype=value.dtype), size,
        (query, gradient, delta, shift, denominator), (*parameters[::2], *state),
        [float32(*query.shape)], [*shared[::2], *_sums(key, parameters[1], value)],
    )  # fmt: skip
    of_key, of_value, of_term, of_key_vectors, of_key_bias = _call(
        _key_kernel, size, (key, value, term), (*parameters[1::2], *seen),
        [float32(*x.shape) for x in (key, value, term)], shared[1::2],
    )  # fmt: skip
    of_parameters = of_query_vectors, of_key_vectors, of_query_bias, of_key_bias
    found = Rows(of_query), Columns(of_key, None, of_value, of_term), of_parameters
    return jax.tree.map(summed_to, found, (rows, columns, parameters))


def _query_kernel(query, gradient, delta, shift, denominator, vectors, bias, maximum,
                  numerator, normalizer, of_query, of_vectors, of_bias, *seen,
                  dtype):  # fmt: skip
    seen = State(*seen)
    at_start(lambda: reset(seen))
    at_start(lambda: clear(of_vectors, of_bias))
    queries = exponents(query[...], vectors[...], bias[...])
    gradients, deltas, is_seeing = gradient[...], delta[...], denominator[...] > 0
    relative = jnp.where(is_seeing, queries + maximum[...] - shift[...], LOWEST)
    slope = jnp.exp(relative) * backward_of_queries(
        gradients, deltas, numerator[...], normalizer[...], dtype
    )
    of_query[...] = backward(query, slope, vectors, of_vectors, of_bias)
    add(seen, queries - shift[...], gradients, deltas, is_seeing, dtype)


def _key_kernel(key, value, term, vectors, bias, maximum, numerator, normalizer, of_key,
                of_value, of_term, of_vectors, of_bias):  # fmt: skip
    at_start(lambda: clear(of_vectors, of_bias))
    keys = exponents(key[...], vectors[...], bias[...]) + term[...]
    seen = State(maximum, numerator, normalizer)
    of_value[...], slope = backward_of_keys(
        keys, value[...], visible_keys(term[...]), seen
    )
    of_key[...] = backward(key, slope, vectors, of_vectors, of_bias)
    of_term[...] = jnp.sum(slope, axis=1, keepdims=True)


bidirectional.defvjp(_save, _gradient)
