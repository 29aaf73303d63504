"""Computes causal linear attention by one Pallas kernel, and gradients by two."""

import functools

import jax
import jax.numpy as jnp

from keras_rfattn.experimental.tpu.blocks import (
    add,
    backward,
    backward_of_keys,
    backward_of_queries,
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
    visible_keys,
    within,
)
from keras_rfattn.experimental.tpu.passes import run, run_backward
from keras_rfattn.ops.features import LOWEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def causal(rows, columns, parameters, size):
    """Computes causal linear attention by exponential features.

    Args:
        rows: `Rows` with the array `query`, `(B, K, T · G, H)`; the G query heads of a
            token are adjacent rows.
        columns: `Columns` with the arrays `key`, `(B, K, T, H)`; `value`,
            `(B, K, T, V)`, whose dtype is that of the products; and `term`,
            `(B, K, T, 1)`, float32, a number added to all exponents of a key, `LOWEST`
            if the key is hidden.
        parameters: `(query_vectors, key_vectors, query_bias, key_bias)`: vectors
            `(B or 1, K, H, M)` and biases `(B or 1, K, 1, M)`, float32.
        size: Number of tokens in a block; it must divide T.

    Returns:
        Array of shape `(B, K, T · G, V)`, float32. A row that sees no key is 0.
    """
    return _save(rows, columns, parameters, size)[0]


def _save(rows, columns, parameters, size):
    """Returns the result of `causal`, and what `_gradient` needs."""
    shape, (batch, heads, length, _) = rows.query.shape[:3], columns.term.shape
    outputs = [float32(*shape, n) for n in (columns.value.shape[-1], 1, 1)]
    reference = float32(batch, heads, length // size, 1, parameters[0].shape[-1])
    found = run(
        _forward_kernel, size, False, rows, (0,), columns, (0,), parameters,
        [*outputs, reference], [],
    )  # fmt: skip
    return found[0], (rows, columns, parameters, *found)


def _exponents(rows, columns, parameters):
    """Returns the exponents of a block's queries and keys."""
    query_vectors, key_vectors, query_bias, key_bias = (x[...] for x in parameters)
    keys = exponents(columns.key[...], key_vectors, key_bias) + columns.term[...]
    return exponents(rows.query[...], query_vectors, query_bias), keys


def _forward_kernel(rows, columns, parameters, found, state):
    """Computes the output of a block of queries, and adds its keys to the sums."""
    (rows, _), (columns, _) = rows[0], columns[0]
    output, shift, denominator, reference = found
    queries, keys = _exponents(rows, columns, parameters)
    visible, values = visible_keys(columns.term[...]), columns.value[...]
    count, size, dtype = queries.shape[0], keys.shape[0], values.dtype
    causally = past(count, size, count // size)
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
        now = within(count, first, last, count // size)
        output[...] = jnp.where(now, divided(found, total), output[...])
        shift[...] = jnp.where(now, relative, shift[...])
        denominator[...] = jnp.where(now, total, denominator[...])
        add(state, keys, values, 1.0, among, dtype)

    clear(output, shift, denominator)
    in_parts(is_held(keys, known, visible), size, step)


def _gradient(size, saved, gradient):
    """Returns the gradients of all arrays that `causal` takes."""
    rows, columns, parameters, output, shift, denominator, reference = saved
    # From here on, `gradient` is that of the numerator. `delta` is minus the
    # gradient of the denominator.
    gradient = divided(gradient, denominator)
    delta = jnp.sum(gradient * output, axis=-1, keepdims=True)
    known = rows._replace(
        gradient=gradient, delta=delta, shift=shift, denominator=denominator,
        reference=reference,
    )  # fmt: skip
    return run_backward(
        (_query_kernel, _key_kernel), size, False, rows, known, (0,), columns, (0,),
        parameters,
    )  # fmt: skip


def _benefit(rows, values, causally):
    """Returns the gradient of the weights `(R, C)` of the keys in a block."""
    benefit = dot(rows.gradient[...].astype(values.dtype), values, (1, 1))
    return jnp.where(causally, benefit - rows.delta[...], 0)


def _query_kernel(rows, columns, parameters, found, state):
    """Computes the gradients of a block of queries, of their vectors and bias."""
    (rows, _), (columns, _) = rows[0], columns[0]
    of_query, *of_parameters = found
    queries, keys = _exponents(rows, columns, parameters)
    visible, values = visible_keys(columns.term[...]), columns.value[...]
    count, size, dtype = queries.shape[0], keys.shape[0], values.dtype
    gradients, deltas = rows.gradient[...], rows.delta[...]
    benefit = _benefit(rows, values, past(count, size, count // size))

    def step(first, last):
        among = visible & within(size, first, last)
        known = reference_of(state.maximum[...], keys, among, first)
        now = within(count, first, last, count // size) & (rows.denominator[...] > 0)
        features = jnp.where(now, queries + known - rows.shift[...], LOWEST)
        slope = backward_of_queries(gradients, deltas, *rebased(state, known), dtype)
        beside = jnp.where(among, jnp.exp(keys - known), 0)
        slope = jnp.exp(features) * (slope + dot(benefit, beside, (1, 0)))
        of_query[...] += backward(rows.query, slope, parameters[0], *of_parameters)
        add(state, keys, values, 1.0, among, dtype)

    clear(of_query)
    in_parts(is_held(keys, rows.reference[...], visible), size, step)


def _key_kernel(rows, columns, parameters, found, state):
    """Computes the gradients of a block of keys and values, of vectors and bias."""
    (rows, _), (columns, _) = rows[0], columns[0]
    of_key, of_value, of_term, *of_parameters = found
    queries, keys = _exponents(rows, columns, parameters)
    visible, values = visible_keys(columns.term[...]), columns.value[...]
    count, size, dtype = queries.shape[0], keys.shape[0], values.dtype
    gradients, shift = rows.gradient[...], rows.shift[...]
    causally = past(count, size, count // size)
    benefit = _benefit(rows, values, causally)
    held = is_held(keys, rows.reference[...], visible)

    def step(first, last):
        among = visible & within(size, first, last)
        own = jnp.max(jnp.where(among, keys, LOWEST), axis=0, keepdims=True)
        known = jnp.where(held, rows.reference[...], own)
        now = within(count, first, last, count // size) & (rows.denominator[...] > 0)
        features = jnp.exp(jnp.where(now, queries + known - shift, LOWEST))
        beside = jnp.where(among, jnp.exp(keys - known), 0)
        weights = jnp.where(causally, dot(features, beside, (1, 1)), 0).astype(dtype)
        # Later queries, summed in `state`, see these keys, and so do queries beside.
        of_values, slope = backward_of_keys(keys, values, among, state)
        of_value[...] += of_values
        of_value[...] += dot(weights, gradients.astype(dtype), (0, 0))
        slope += beside * dot(benefit, features, (0, 0))
        of_key[...] += backward(columns.key, slope, parameters[1], *of_parameters)
        of_term[...] += jnp.sum(slope, axis=1, keepdims=True)
        add(state, queries - shift, gradients, rows.delta[...], now, dtype)

    clear(of_key, of_value, of_term)
    in_parts(held, size, step, reverse=True)


causal.defvjp(_save, _gradient)
