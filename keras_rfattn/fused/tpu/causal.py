"""Computes causal linear attention by one Pallas kernel, and gradients by two."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_rfattn.fused.tpu.blocks import (
    ORDER,
    State,
    add,
    at_start,
    block,
    clear,
    divided,
    dot,
    exponents,
    float32,
    in_parts,
    is_held,
    look_up,
    past,
    rebased,
    reference_of,
    reset,
    row_of_block,
    state_shapes,
    summed_to,
    visible_keys,
    whole,
    within,
)
from keras_rfattn.ops.features import LOWEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def causal(query, key, value, term, query_vectors, key_vectors, query_bias, key_bias,
           size):  # fmt: skip
    """Computes causal linear attention by exponential features.

    Args:
        query: Array of shape `(B, K, T · G, H)`; the G query heads of a token are
            adjacent rows.
        key: Array of shape `(B, K, T, H)`.
        value: Array of shape `(B, K, T, V)`; its dtype is that of the products.
        term: Array of shape `(B, K, T, 1)`, float32: a number added to all exponents of
            a key, `LOWEST` if the key is hidden.
        query_vectors: Array of shape `(B or 1, K, H, M)`, float32.
        key_vectors: Array of shape `(B or 1, K, H, M)`, float32.
        query_bias: Array of shape `(B or 1, K, 1, M)`, float32.
        key_bias: Array of shape `(B or 1, K, 1, M)`, float32.
        size: Number of tokens in a block; it must divide T.

    Returns:
        Array of shape `(B, K, T · G, V)`, float32. A row that sees no key is 0.
    """
    return _forward(
        query, key, value, term, query_vectors, key_vectors, query_bias, key_bias, size
    )[0]


def _forward(query, key, value, term, *parameters_and_size):
    """Returns the output, and the shift, denominator and reference for gradients."""
    *parameters, size = parameters_and_size
    batch, heads, length = term.shape[:3]
    groups, width = query.shape[2] // length, parameters[0].shape[-1]
    rows, count = size * groups, length // size
    output = pl.pallas_call(
        functools.partial(_forward_kernel, groups=groups),
        grid=(batch, heads, count),
        in_specs=[
            block(rows, query.shape[-1]), block(size, key.shape[-1]),
            block(size, value.shape[-1]), block(size, 1), *map(whole, parameters),
        ],
        out_specs=[
            block(rows, value.shape[-1]), block(rows, 1), block(rows, 1),
            row_of_block(width),
        ],
        out_shape=[
            float32(*query.shape[:3], value.shape[-1]), float32(*query.shape[:3], 1),
            float32(*query.shape[:3], 1), float32(batch, heads, count, 1, width),
        ],
        scratch_shapes=state_shapes(width, value.shape[-1]),
        compiler_params=ORDER,
    )(query, key, value, term, *parameters)  # fmt: skip
    return output


def _forward_kernel(query, key, value, term, query_vectors, key_vectors, query_bias,
                    key_bias, output, shift, denominator, reference, *state,
                    groups):  # fmt: skip
    """Computes the output of a block of queries, and adds its keys to the sums."""
    state, dtype, size = State(*state), value.dtype, term.shape[0]
    at_start(lambda: reset(state))
    keys = exponents(key[...], key_vectors[...], key_bias[...]) + term[...]
    queries = exponents(query[...], query_vectors[...], query_bias[...])
    visible, values = visible_keys(term[...]), value[...]
    causally = past(queries.shape[0], size, groups)
    known = reference_of(state.maximum[...], keys, visible, 0)
    reference[...] = known

    def step(first, last):
        among = visible & within(size, first, last)
        known = reference_of(state.maximum[...], keys, among, first)
        lifted = queries + known
        relative = jnp.max(lifted, axis=1, keepdims=True)
        features = jnp.exp(lifted - relative)
        found, total = look_up(features, *rebased(state, known), dtype)
        beside = jnp.where(among, jnp.exp(keys - known), 0)
        weights = dot(features, beside, (1, 1))
        weights = jnp.where(causally, weights, 0).astype(dtype)
        found = found + dot(weights, values, (1, 0))
        total += jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
        now = within(queries.shape[0], first, last, groups)
        output[...] = jnp.where(now, divided(found, total), output[...])
        shift[...] = jnp.where(now, relative, shift[...])
        denominator[...] = jnp.where(now, total, denominator[...])
        add(state, keys, values, 1.0, among, dtype)

    clear(output, shift, denominator)
    in_parts(is_held(keys, known, visible), size, step)


def _save(*arguments):
    """Returns the result of `causal`, and what `_gradient` needs."""
    output, shift, denominator, reference = _forward(*arguments)
    saved = (*arguments[:-1], output, shift, denominator, reference)
    return output, saved


def _gradient(size, saved, gradient):
    """Returns the gradients of all arrays that `causal` takes."""
    *inputs, output, shift, denominator, reference = saved
    query, key, value, term, *parameters = inputs
    # From here on, `gradient` is that of the numerator. `worth` is minus the
    # gradient of the denominator.
    gradient = divided(gradient, denominator)
    worth = jnp.sum(gradient * output, axis=-1, keepdims=True)
    of_rows = gradient, worth, shift, denominator
    batch, heads, length = term.shape[:3]
    groups, width = query.shape[2] // length, parameters[0].shape[-1]
    rows, count = size * groups, length // size
    dims = query.shape[-1], value.shape[-1]

    def specs(order=None):
        return [
            block(rows, dims[0], order), block(size, dims[0], order),
            block(size, dims[1], order), block(size, 1, order), *map(whole, parameters),
            block(rows, dims[1], order), *[block(rows, 1, order)] * 3,
            row_of_block(width, order),
        ]  # fmt: skip

    shared = [float32(batch, heads, dims[0], width), float32(batch, heads, 1, width)]
    kernel = functools.partial(
        pl.pallas_call, grid=(batch, heads, count), compiler_params=ORDER,
        scratch_shapes=state_shapes(width, dims[1]),
    )  # fmt: skip
    arguments = query, key, value, term, *parameters, *of_rows, reference
    of_query, of_query_vectors, of_query_bias = kernel(
        functools.partial(_query_kernel, groups=groups),
        in_specs=specs(),
        out_specs=[block(rows, dims[0]), *map(whole, shared)],
        out_shape=[float32(*query.shape), *shared],
    )(*arguments)
    of_key, of_value, of_term, of_key_vectors, of_key_bias = kernel(
        functools.partial(_key_kernel, groups=groups),
        in_specs=specs(count),
        out_specs=[
            block(size, dims[0], count), block(size, dims[1], count),
            block(size, 1, count), *map(whole, shared),
        ],
        out_shape=[
            float32(*key.shape), float32(*value.shape), float32(*term.shape), *shared,
        ],
    )(*arguments)  # fmt: skip
    found = (
        of_query, of_key, of_value, of_term, of_query_vectors, of_key_vectors,
        of_query_bias, of_key_bias,
    )  # fmt: skip
    return tuple(summed_to(x, y) for x, y in zip(found, inputs, strict=True))


def _query_kernel(query, key, value, term, query_vectors, key_vectors, query_bias,
                  key_bias, gradient, worth, shift, denominator, reference, of_query,
                  of_vectors, of_bias, *state, groups):  # fmt: skip
    """Computes the gradients of a block of queries, of their vectors and bias."""
    state, dtype, size = State(*state), value.dtype, term.shape[0]
    at_start(lambda: reset(state))
    keys = exponents(key[...], key_vectors[...], key_bias[...]) + term[...]
    queries = exponents(query[...], query_vectors[...], query_bias[...])
    visible, values = visible_keys(term[...]), value[...]
    gradients, worths = gradient[...], worth[...]
    benefit = dot(gradients.astype(dtype), values, (1, 1)) - worths
    benefit = jnp.where(past(queries.shape[0], size, groups), benefit, 0)

    clear(of_query)
    at_start(lambda: clear(of_vectors, of_bias))
    held = is_held(keys, reference[...], visible)

    def step(first, last):
        among = visible & within(size, first, last)
        known = reference_of(state.maximum[...], keys, among, first)
        now = within(queries.shape[0], first, last, groups) & (denominator[...] > 0)
        features = jnp.exp(jnp.where(now, queries + known - shift[...], LOWEST))
        numerator, normalizer = rebased(state, known)
        slope = dot(gradients.astype(dtype), numerator.astype(dtype), (1, 0))
        slope = slope - worths * normalizer
        beside = jnp.where(among, jnp.exp(keys - known), 0)
        slope = features * (slope + dot(benefit, beside, (1, 0)))
        of_query[...] += dot(slope, query_vectors[...], (1, 1))
        of_vectors[...] += dot(query[...].astype(jnp.float32), slope, (0, 0))
        of_bias[...] += jnp.sum(slope, axis=0, keepdims=True)
        add(state, keys, values, 1.0, among, dtype)

    in_parts(held, size, step)


def _key_kernel(query, key, value, term, query_vectors, key_vectors, query_bias,
                key_bias, gradient, worth, shift, denominator, reference, of_key,
                of_value, of_term, of_vectors, of_bias, *state, groups):  # fmt: skip
    """Computes the gradients of a block of keys and values, of vectors and bias.

    Blocks run from the last to the first, and `state` sums over later queries.
    """
    state, dtype, size = State(*state), value.dtype, term.shape[0]
    at_start(lambda: reset(state))
    keys = exponents(key[...], key_vectors[...], key_bias[...]) + term[...]
    queries = exponents(query[...], query_vectors[...], query_bias[...])
    visible, values = visible_keys(term[...]), value[...]
    gradients, worths = gradient[...], worth[...]
    causally = past(queries.shape[0], size, groups)
    benefit = dot(gradients.astype(dtype), values, (1, 1)) - worths
    benefit = jnp.where(causally, benefit, 0)
    seeing = denominator[...] > 0

    clear(of_key, of_value, of_term)
    at_start(lambda: clear(of_vectors, of_bias))
    held = is_held(keys, reference[...], visible)

    def step(first, last):
        among = visible & within(size, first, last)
        own = jnp.max(jnp.where(among, keys, LOWEST), axis=0, keepdims=True)
        known = jnp.where(held, reference[...], own)
        now = seeing & within(queries.shape[0], first, last, groups)
        features = jnp.exp(jnp.where(now, queries + known - shift[...], LOWEST))
        beside = jnp.where(among, jnp.exp(keys - known), 0)
        # The features by which later queries, summed in `state`, see these keys.
        later = jnp.where(among, jnp.exp(keys + state.maximum[...]), 0)
        weights = jnp.where(causally, dot(features, beside, (1, 1)), 0).astype(dtype)
        of_value[...] += dot(later.astype(dtype), state.numerator[...].astype(dtype),
                             (1, 1))  # fmt: skip
        of_value[...] += dot(weights, gradients.astype(dtype), (0, 0))
        slope = dot(values, state.numerator[...].astype(dtype), (1, 0))
        slope = later * (slope - state.normalizer[...])
        slope += beside * dot(benefit, features, (0, 0))
        of_key[...] += dot(slope, key_vectors[...], (1, 1))
        of_term[...] += jnp.sum(slope, axis=1, keepdims=True)
        of_vectors[...] += dot(key[...].astype(jnp.float32), slope, (0, 0))
        of_bias[...] += jnp.sum(slope, axis=0, keepdims=True)
        add(state, queries - shift[...], gradients, worths, now, dtype)

    in_parts(held, size, step, reverse=True)


causal.defvjp(_save, _gradient)
