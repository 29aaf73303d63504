"""Attention without causality as two kernels: one sums the keys, one reads the sums."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_rfattn.fused.tpu.blocks import (
    ORDER,
    State,
    accumulate,
    add,
    at_start,
    block,
    divided,
    dot,
    exponents,
    float32,
    look_up,
    reset,
    summed_to,
    visible_keys,
    whole,
)
from keras_rfattn.ops.features import LOWEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def bidirectional(query, key, value, term, query_vectors, key_vectors, query_bias,
                  key_bias, size):  # fmt: skip
    """Computes linear attention by exponential features, without causality.

    The arguments are those of `causal`, but queries and keys may have different
    lengths, each a multiple of `size`.
    """
    return _forward(
        query, key, value, term, query_vectors, key_vectors, query_bias, key_bias, size
    )[0]


def _call(kernel, rows, size, inputs, out_specs, out_shape):
    """Runs a kernel over blocks; the first `rows` of `inputs` are cut into blocks."""
    batch, heads = inputs[0].shape[:2]
    return pl.pallas_call(
        kernel, grid=(batch, heads, inputs[0].shape[2] // size),
        in_specs=[
            *(block(size, x.shape[-1]) for x in inputs[:rows]),
            *map(whole, inputs[rows:]),
        ],
        out_specs=out_specs, out_shape=out_shape, compiler_params=ORDER,
    )(*inputs)  # fmt: skip


def _sums(batch, heads, width, value_dim):
    """Returns the shapes of a `State` as outputs."""
    rows = 1, value_dim, 1
    return [float32(batch, heads, n, width) for n in rows]


def _forward(query, key, value, term, query_vectors, key_vectors, query_bias, key_bias,
             size):  # fmt: skip
    shapes = _sums(*key.shape[:2], key_vectors.shape[-1], value.shape[-1])
    state = _call(
        _sum_kernel, 3, size, (key, value, term, key_vectors, key_bias),
        list(map(whole, shapes)), shapes,
    )  # fmt: skip
    widths = value.shape[-1], 1, 1
    output = _call(
        functools.partial(_read_kernel, dtype=value.dtype), 1, size,
        (query, query_vectors, query_bias, *state),
        [block(size, n) for n in widths],
        [float32(*query.shape[:3], n) for n in widths],
    )  # fmt: skip
    return (*output, *state)


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


def _save(*arguments):
    output, *rest = _forward(*arguments)
    return output, (*arguments[:-1], output, *rest)


def _gradient(size, saved, gradient):
    inputs, (output, shift, denominator, *state) = saved[:8], saved[8:]
    query, key, value, term, query_vectors, key_vectors, query_bias, key_bias = inputs
    gradient = divided(gradient, denominator)
    worth = jnp.sum(gradient * output, axis=-1, keepdims=True)
    (batch, heads), width = query.shape[:2], key_vectors.shape[-1]
    shared = [
        float32(batch, heads, query.shape[-1], width),
        float32(batch, heads, 1, width),
    ]
    shapes = [*shared, *_sums(batch, heads, width, value.shape[-1])]
    of_query, of_query_vectors, of_query_bias, *seen = _call(
        functools.partial(_query_kernel, dtype=value.dtype), 5, size,
        (query, gradient, worth, shift, denominator, query_vectors, query_bias, *state),
        [block(size, query.shape[-1]), *map(whole, shapes)],
        [float32(*query.shape), *shapes],
    )  # fmt: skip
    widths = key.shape[-1], value.shape[-1], 1
    of_key, of_value, of_term, of_key_vectors, of_key_bias = _call(
        _key_kernel, 3, size, (key, value, term, key_vectors, key_bias, *seen),
        [*(block(size, n) for n in widths), *map(whole, shared)],
        [*(float32(*key.shape[:3], n) for n in widths), *shared],
    )  # fmt: skip
    found = (
        of_query, of_key, of_value, of_term, of_query_vectors, of_key_vectors,
        of_query_bias, of_key_bias,
    )  # fmt: skip
    return tuple(summed_to(x, y) for x, y in zip(found, inputs, strict=True))


def _query_kernel(query, gradient, worth, shift, denominator, vectors, bias, maximum,
                  numerator, normalizer, of_query, of_vectors, of_bias, *seen,
                  dtype):  # fmt: skip
    seen = State(*seen)
    at_start(lambda: reset(seen))
    queries = exponents(query[...], vectors[...], bias[...])
    gradients, worths, is_seeing = gradient[...], worth[...], denominator[...] > 0
    slope = dot(gradients.astype(dtype), numerator[...].astype(dtype), (1, 0))
    slope = slope - worths * normalizer[...]
    relative = jnp.where(is_seeing, queries + maximum[...] - shift[...], LOWEST)
    slope = jnp.exp(relative) * slope
    of_query[...] = dot(slope, vectors[...], (1, 1))
    of_x = dot(query[...].astype(jnp.float32), slope, (0, 0))
    accumulate((of_vectors, of_bias), (of_x, jnp.sum(slope, axis=0, keepdims=True)))
    add(seen, queries - shift[...], gradients, worths, is_seeing, dtype)


def _key_kernel(key, value, term, vectors, bias, maximum, numerator, normalizer, of_key,
                of_value, of_term, of_vectors, of_bias):  # fmt: skip
    dtype, visible = value.dtype, visible_keys(term[...])
    keys = exponents(key[...], vectors[...], bias[...]) + term[...]
    features = jnp.where(visible, jnp.exp(keys + maximum[...]), 0)
    of_output = numerator[...].astype(dtype)
    of_value[...] = dot(features.astype(dtype), of_output, (1, 1))
    slope = features * (dot(value[...], of_output, (1, 0)) - normalizer[...])
    of_key[...] = dot(slope, vectors[...], (1, 1))
    of_term[...] = jnp.sum(slope, axis=1, keepdims=True)
    of_x = dot(key[...].astype(jnp.float32), slope, (0, 0))
    accumulate((of_vectors, of_bias), (of_x, jnp.sum(slope, axis=0, keepdims=True)))


bidirectional.defvjp(_save, _gradient)
