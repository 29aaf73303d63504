"""Bidirectional attention: one sum over the keys, then one product per query."""

import functools

import keras
from keras import ops

from keras_rfattn.backend.loops import by_heads, compiled
from keras_rfattn.backend.precision import (
    accumulated_matmul,
    largest_of,
    representable,
    wide_dtype,
)
from keras_rfattn.backend.sizes import product
from keras_rfattn.fused import torch_cpu as fused
from keras_rfattn.ops.features import Deferred, Exponents, Marked
from keras_rfattn.ops.layout import (
    heads_first,
    last_apart,
    merge_heads,
    split_heads,
    take_apart,
)
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.sums import Reading, admit, normalize, read, summarize

# Number of features of all heads, tokens included, up to which JAX on a CPU computes
# all heads at once. There a loop over heads would cost more than a larger cache.
AT_ONCE = 2**20


def bidirectional(query_features, key_features, value, key_mask=None):
    """Computes linear attention without causality in O((T + S) · M · V).

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Deferred` features of
            that shape.
        key_features: `Features` or `Deferred` features of shape `(B, S, K, M)`.
        value: Array of shape `(B, S, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, S)`, true for visible keys. Hidden keys
            and values may hold anything, NaN included.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    sides = [take_apart(x) for x in (query_features, key_features)]
    arrays, functions = zip(*sides, strict=True)
    is_through = all(f is not None and f.is_exponential for f in functions)
    is_through = is_through and value.dtype == wide_dtype(value)
    if is_through and keras.backend.backend() == "jax":
        return _let_through(functions, (*arrays, value, key_mask))
    return _whole(query_features, key_features, value, key_mask)


def _let_through(functions, parts):
    """Runs attention on JAX, where a CPU lets NaN propagate through the products.

    That propagation is free. The gradient marks tokens that are not finite separately
    (`_apart`), because NaN times the 0 gradient of an output that nothing reads would
    be NaN.
    """
    import jax

    # Compiled programs outlive a feature map, so the gradient rule is set outside of
    # them: they must not ask for it later.
    through, apart = (compiled(x, functions=functions) for x in (_through, _apart))
    attend = jax.custom_jvp(through)
    attend.defjvp(lambda primals, tangents: jax.jvp(apart, primals, tangents))
    return attend(*parts)


def _through(*parts, functions):
    import jax

    through = functools.partial(_apart, functions=functions, is_apart=False)
    apart = functools.partial(_apart, functions=functions)
    return jax.lax.platform_dependent(*parts, cpu=through, default=apart)


def _apart(*parts, functions, is_apart=True):
    *sides, value, mask = parts
    features = [Deferred(f, *x) for f, x in zip(functions, sides, strict=True)]
    return _whole(*features, value, mask, is_apart)


def _whole(query_features, key_features, value, key_mask, is_apart=True):
    """Implements `bidirectional`; `is_apart` is an argument of `heads_first`."""
    num_kv_heads, num_heads = value.shape[2], query_features.num_heads
    dtype, value = value.dtype, representable(value)
    query, key = (
        heads_first(x, num_kv_heads, is_query, is_lazy=True, is_apart=is_apart)
        for x, is_query in ((query_features, True), (key_features, False))
    )
    value = split_heads(value, num_kv_heads)
    shapes = value.shape, query.spoiled.shape
    sizes = [product(*x[::2][:2], key.features.width) for x in shapes]
    size = None if None in sizes else max(sizes)
    parts = query, key, value, heads_mask(key_mask)
    if fused.is_fused(query, key, value):
        output = _without_features(*parts)
    elif is_apart:
        output = by_heads(_attend, parts, size)
    else:
        is_little = size is None or num_kv_heads * size <= AT_ONCE
        output = by_heads(_attend_through, parts, None if is_little else size)
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def _without_features(query, key, value, mask):
    """Computes all heads by PyTorch's fused operation."""
    key, value = admit(key, value, mask)
    spoiled = ops.sum(key.spoiled, axis=-2, keepdims=True)
    return fused.attend(query.features, key.features, value) + (query.spoiled + spoiled)


def _attend(query, key, value, mask):
    """Computes some heads: the output has shape `(B, K, R, V)`."""
    # Features that are computed here may be overwritten. Keys are done before queries
    # start, so that memory holds the features of one side at a time.
    are_own = [isinstance(x.features, Exponents) for x in (query, key)]
    key, value = admit(key, value, mask)
    key = Marked(key.features.compute(), key.spoiled)
    sums = summarize(key, value, mask, is_last=are_own[1])
    del key
    features = query.features.compute()
    reading = read(sums, features, value.dtype, is_last=are_own[0])
    spoiled = query.spoiled + ops.expand_dims(sums.spoiled, (-2, -1))
    return normalize(reading, features, spoiled, value.dtype)


def _attend_through(query, key, value, mask):
    """Computes `_attend` of `Exponents` and values, either of which may hold NaN.

    Values have dtype float32 or float64. Key features are laid out with the feature
    axis before the token axis, which gives all products the order that XLA is fastest
    in.
    """
    query, key, value = query.features, key.features, hide(value, mask)
    key = key._replace(x=hide(key.x, mask)).hidden(mask)
    exponent = _columns(key)
    maximum = largest_of(exponent, axis=-1, keepdims=True)
    # A row that sees no key weighs all hidden keys equally; their values are 0.
    both = ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
    columns = ops.cast(ops.exp(exponent - maximum), value.dtype)
    sums = accumulated_matmul(columns, both)
    exponent = query.compute().log_scale + ops.swapaxes(maximum, -1, -2)
    shift = largest_of(exponent, axis=-1, keepdims=True)
    rows = ops.cast(ops.exp(exponent - shift), value.dtype)
    found = accumulated_matmul(rows, sums)
    numerator, denominator = last_apart(found)
    reading = Reading(shift[..., 0], numerator, denominator, denominator)
    # One entry of a value that is not finite must reach all entries of an output.
    spoiled = ops.sum(0 * sums, axis=(-2, -1), keepdims=True)
    return normalize(reading, query, spoiled, value.dtype)


def _columns(features):
    """Returns the exponents of `Exponents`, features before tokens: `(B, K, M, S)`."""
    x, vectors, bias, common = features
    vectors, bias = (ops.cast(y, x.dtype) for y in (vectors, bias))
    found = accumulated_matmul(
        vectors, x, transpose_a=True, transpose_b=True, is_precise=True
    )
    found = found + ops.swapaxes(bias, -1, -2)
    return found if common is None else found + ops.swapaxes(common, -1, -2)
