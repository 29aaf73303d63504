"""Computes attention with windows by Pallas kernels, which process a window at a time.

A pass weighs the windows near a query's own, if any, exactly by `exp(q · k)`. It reads
all windows farther away on one side from the sums of their features. Causal attention
needs one pass. Other attention needs one in each direction, of which only the first
weighs the windows nearby, and `joined` combines the two outputs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

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
    look_up,
    past,
    visible_keys,
)
from keras_rfattn.experimental.tpu.passes import Pass, run, run_backward
from keras_rfattn.ops.features import LOWEST


def windowed(rows, columns, parameters, size, is_causal, is_sliding):
    """Computes attention that is exact within windows and uses features beyond."""
    lag = 1 if is_sliding else 0
    after = () if is_causal else tuple(range(1, lag + 1))
    first = Pass(size, (*range(-lag, 1), *after), -lag - 1, is_causal)
    arguments = rows, columns, parameters
    found = one_way(*arguments, first)
    if is_causal:
        return found[0]
    return joined(found, one_way(*arguments, Pass(size, (), lag + 1, False)))


def joined(one, other):
    """Returns the output of two passes, joined by their log normalizers."""
    outputs, totals = zip(one, other, strict=True)
    shift = lax.stop_gradient(jnp.maximum(*totals))
    weights = [jnp.exp(x - shift) for x in totals]
    found = sum(w * x for w, x in zip(weights, outputs, strict=True))
    return found / sum(weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def one_way(rows, columns, parameters, what):
    """Returns the output `(B, K, T · G, V)` of a `Pass`, and its log normalizer."""
    return _save(rows, columns, parameters, what)[0]


def _save(rows, columns, parameters, what):
    """Returns the result of `one_way`, and what `_gradient` needs."""
    widths = columns.value.shape[-1], 1, 1
    found = run(
        functools.partial(_forward_kernel, what=what), what.size, what.is_backward,
        rows, (0,), columns, what.keys, parameters,
        [float32(*rows.query.shape[:3], n) for n in widths], [],
    )  # fmt: skip
    output, shift, denominator = found
    total = jnp.where(denominator > 0, shift + jnp.log(denominator), LOWEST)
    return (output, total), (rows, columns, parameters, *found)


def _gradient(what, saved, gradients):
    """Returns the gradients of `rows`, `columns` and `parameters` of `one_way`."""
    rows, columns, parameters, output, shift, denominator = saved
    gradient, of_total = (divided(x, denominator) for x in gradients)
    # Minus the gradient of the denominator.
    delta = jnp.sum(gradient * output, axis=-1, keepdims=True) - of_total
    known = rows._replace(
        gradient=gradient, delta=delta, shift=shift, denominator=denominator
    )
    kernels = (functools.partial(x, what=what) for x in (_query_kernel, _key_kernel))
    return run_backward(
        tuple(kernels), what.size, what.is_backward, rows, known, what.queries, columns,
        what.keys, parameters,
    )  # fmt: skip


one_way.defvjp(_save, _gradient)


def _logits(rows, columns, offset, what):
    """Returns exact logits `(R, C)` minus `common`, or `LOWEST` for keys not seen."""
    near, other = (x[...].astype(jnp.float32) for x in (rows.near, columns.near))
    found = dot(near, other, (1, 1), lax.Precision.HIGHEST) - rows.common[...]
    seen = jnp.transpose(columns.term[...]) > LOWEST / 2
    if what.is_causal and offset == 0:
        seen = seen & past(*found.shape, found.shape[0] // what.size)
    return jnp.where(seen, found, LOWEST)


def _weights(logits, shift, is_used):
    """Returns weights `(R, C)` relative to `exp(shift)`."""
    relative = jnp.minimum(logits - shift, 0)
    return jnp.where((logits > LOWEST / 2) & is_used, jnp.exp(relative), 0)


def _forward_kernel(queries, keys, parameters, found, state, *, what):
    """Computes the output of a window of queries, then adds a window to the sums."""
    query_vectors, key_vectors, query_bias, key_bias = parameters
    (rows, _), (output, shift, denominator) = queries[0], found
    dtype = keys[what.joining][0].value.dtype
    lifted = exponents(rows.query[...], query_vectors[...], query_bias[...])
    lifted = lifted + state.maximum[...]
    largest = jnp.max(lifted, axis=1, keepdims=True)
    near = {x: _logits(rows, keys[x][0], x, what) for x in what.nearby}
    for x, logits in near.items():
        most = jnp.max(logits, axis=1, keepdims=True)
        largest = jnp.maximum(largest, jnp.where(keys[x][1], most, LOWEST))
    features = jnp.exp(lifted - largest)
    numerator, total = look_up(
        features, state.numerator[...], state.normalizer[...], dtype
    )
    for x, logits in near.items():
        columns, there = keys[x]
        weights = _weights(logits, largest, there).astype(dtype)
        numerator += dot(weights, columns.value[...], (1, 0))
        total += jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
    output[...], shift[...] = divided(numerator, total), largest
    denominator[...] = total
    _join_keys(keys[what.joining], key_vectors, key_bias, state)


def _join_keys(columns_and_there, vectors, bias, state):
    """Adds a window of keys to the sums, if the sequence has that window."""
    columns, there = columns_and_there
    term, value = columns.term[...], columns.value[...]
    exponent = exponents(columns.key[...], vectors[...], bias[...]) + term
    add(state, exponent, value, 1.0, visible_keys(term) & there, value.dtype)


def _query_kernel(queries, keys, parameters, found, state, *, what):
    """Computes the gradients of a window of queries, of their vectors and bias."""
    query_vectors, key_vectors, query_bias, key_bias = parameters
    of_query, of_near, of_common, *of_parameters = found
    rows, _ = queries[0]
    dtype = keys[what.joining][0].value.dtype
    is_seeing = rows.denominator[...] > 0
    lifted = exponents(rows.query[...], query_vectors[...], query_bias[...])
    lifted = lifted + state.maximum[...] - rows.shift[...]
    slope = jnp.exp(jnp.where(is_seeing, lifted, LOWEST)) * backward_of_queries(
        rows.gradient[...], rows.delta[...], state.numerator[...],
        state.normalizer[...], dtype,
    )  # fmt: skip
    of_query[...] = backward(rows.query, slope, query_vectors, *of_parameters)
    clear(of_near, of_common)
    for x in what.nearby:
        columns, there = keys[x]
        slope, _ = _slope(rows, columns, there, x, what)
        of_near[...] += dot(slope, columns.near[...].astype(jnp.float32), (1, 0))
        of_common[...] -= jnp.sum(slope, axis=1, keepdims=True)
    _join_keys(keys[what.joining], key_vectors, key_bias, state)


def _slope(rows, columns, there, offset, what):
    """Returns the gradient of exact logits `(R, C)`, and the weights."""
    logits, dtype = _logits(rows, columns, offset, what), columns.value.dtype
    is_used = there & (rows.denominator[...] > 0)
    weights = _weights(logits, rows.shift[...], is_used)
    benefit = dot(rows.gradient[...].astype(dtype), columns.value[...], (1, 1))
    return weights * (benefit - rows.delta[...]), weights


def _key_kernel(queries, keys, parameters, found, state, *, what):
    """Computes the gradients of a window of keys and values, of vectors and bias."""
    query_vectors, key_vectors, query_bias, key_bias = parameters
    of_key, of_near, of_value, of_term, *of_parameters = found
    columns, _ = keys[0]
    term, dtype = columns.term[...], columns.value.dtype
    exponent = exponents(columns.key[...], key_vectors[...], key_bias[...]) + term
    of_value[...], slope = backward_of_keys(
        exponent, columns.value[...], visible_keys(term), state
    )
    of_key[...] = backward(columns.key, slope, key_vectors, *of_parameters)
    of_term[...] = jnp.sum(slope, axis=1, keepdims=True)
    clear(of_near)
    for x in what.nearby:
        rows, there = queries[-x]
        slope, weights = _slope(rows, columns, there, x, what)
        of_near[...] += dot(slope, rows.near[...].astype(jnp.float32), (0, 0))
        gradient = rows.gradient[...].astype(dtype)
        of_value[...] += dot(weights.astype(dtype), gradient, (0, 0))
    rows, there = queries[-what.joining]
    exponent = exponents(rows.query[...], query_vectors[...], query_bias[...])
    among = (rows.denominator[...] > 0) & there
    add(
        state, exponent - rows.shift[...], rows.gradient[...], rows.delta[...], among,
        dtype,
    )  # fmt: skip
