"""Operations of the Triton kernels on blocks of queries and keys.

A block is C tokens of one head. Features `(C, M)` are `exp(x · vectors + bias + term)`,
where `term` is one number per token. For queries it cancels and is left out; for keys
it is `LOWEST` where a key is hidden.

Sums over tokens are float32 and relative to a running maximum per feature: `maximum`
`(M,)`, `numerator` `(M, V)` and `normalizer` `(M,)`. Sums over keys hold values and
ones. In the backward pass, sums over queries hold gradients of outputs and `delta`,
their products with outputs.
"""

import os

import triton
import triton.language as tl

from keras_rfattn.ops import features

LOWEST = tl.constexpr(features.LOWEST)
# The largest excess of a key's exponent over the reference that the product of a block
# can hold.
SPAN = tl.constexpr(40.0)
# The log of the denominator of a query that sees no key, and the least of the others.
UNSEEN = tl.constexpr(-features.LOWEST)
TINY = tl.constexpr(1e-37)
# Triton's interpreter multiplies bfloat16 wrongly, so it multiplies in float32.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b):
    """Returns the matrix product of two arrays of one dtype, in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def dot_like(a, b, like):
    """Returns the product of float32 arrays, precise enough for the dtype of `like`."""
    if INTERPRETED or like.dtype == tl.float32:
        return dot(a, b)
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def exponents(x, vectors, bias):
    """Returns exponents `(C, M)` of tokens `(C, H)`, float32."""
    if x.dtype == tl.float32:
        products = dot(x, vectors)
    else:
        high = vectors.to(x.dtype)
        low = (vectors - high.to(tl.float32)).to(x.dtype)
        products = dot(x, high) + dot(x, low)
    return products + bias[None, :]


@triton.jit
def no_tokens(M: tl.constexpr, V: tl.constexpr):
    """Returns the sums over no token."""
    maximum = tl.full((M,), LOWEST, tl.float32)
    return maximum, tl.zeros((M, V), tl.float32), tl.zeros((M,), tl.float32)


@triton.jit
def add(maximum, numerator, normalizer, exponent, visible, value, weight):
    """Returns the sums after the tokens of a block."""
    exponent = tl.where(visible[:, None], exponent, LOWEST)
    new = tl.maximum(maximum, tl.max(exponent, 0))
    scale = tl.exp(maximum - new)
    found = tl.where(visible[:, None], tl.exp(exponent - new[None, :]), 0.0)
    found = found.to(value.dtype)
    numerator = numerator * scale[:, None] + dot(tl.trans(found), value)
    found = found.to(tl.float32) * weight[:, None]
    return new, numerator, normalizer * scale + tl.sum(found, 0)


@triton.jit
def divided(found, whole, shift):
    """Returns outputs and the logs of denominators `whole`, relative to a shift."""
    is_seen = whole > 0
    output = found / tl.where(is_seen, whole, 1.0)[:, None]
    log = tl.where(is_seen, shift + tl.log(tl.maximum(whole, TINY)), UNSEEN)
    return tl.where(is_seen[:, None], output, 0.0), log


@triton.jit
def look_up(queries, maximum, numerator, normalizer, dtype: tl.constexpr):
    """Returns numerators, denominators and shifts that queries read of sums."""
    raised = queries + maximum[None, :]
    shift = tl.max(raised, 1)
    rows = tl.exp(raised - shift[:, None]).to(dtype)
    found = dot(rows, numerator.to(dtype))
    return found, tl.sum(rows.to(tl.float32) * normalizer[None, :], 1), shift


@triton.jit
def reference_of(maximum, keys, visible, C: tl.constexpr):
    """Returns the maximum `(M,)` that all queries of the block may use."""
    place = tl.arange(0, C)
    first = tl.min(tl.where(visible, place, C), 0)
    row = tl.max(tl.where((place == first)[:, None], keys, LOWEST), 0)
    is_known = (tl.max(maximum, 0) <= LOWEST / 2) | (first == 0)
    return tl.where(is_known, tl.maximum(maximum, row), maximum)


@triton.jit
def excess_of(keys, reference, visible, C: tl.constexpr):
    """Returns the excess `(C, M)` of keys, and which queries see too large a one."""
    place = tl.arange(0, C)
    excess = tl.where(visible[:, None], keys - reference[None, :], LOWEST)
    causally = place[:, None] >= place[None, :]
    seen = tl.where(causally, tl.max(excess, 1)[None, :], LOWEST)
    return excess, tl.max(seen, 1) > SPAN


@triton.jit
def row_of(x, i, C: tl.constexpr):
    """Returns row i of an array of shape `(C, n)`."""
    at = tl.arange(0, C) == i
    return tl.sum(tl.where(at[:, None], x, 0.0), 0)


@triton.jit
def number_of(x, i, C: tl.constexpr):
    """Returns number i of an array of shape `(C,)`."""
    return tl.sum(tl.where(tl.arange(0, C) == i, x, 0.0), 0)


@triton.jit
def products_of_row(query, keys, shift, visible, i, C: tl.constexpr):
    """Returns the products `(C, M)` of the features of query i with those of keys."""
    seen = visible & (tl.arange(0, C) <= i)
    return tl.exp(tl.where(seen[:, None], query[None, :] + keys - shift, LOWEST))


@triton.jit
def read(
    queries, reference, maximum, numerator, normalizer, keys, visible, value,
    C: tl.constexpr,
):  # fmt: skip
    """Returns what queries read of earlier sums and of the keys of their own block."""
    place = tl.arange(0, C)
    excess, exceeds = excess_of(keys, reference, visible, C)
    raised = queries + reference[None, :]
    shift = tl.max(raised, 1)
    rows = tl.exp(raised - shift[:, None])
    weights = dot_like(rows, tl.trans(tl.exp(tl.minimum(excess, SPAN))), value)
    causally = (place[:, None] >= place[None, :]) & visible[None, :]
    weights = tl.where(causally, weights, 0.0).to(value.dtype)
    rows = rows.to(value.dtype)
    scale = tl.exp(maximum - reference)
    found = dot(rows, (numerator * scale[:, None]).to(value.dtype))
    found += dot(weights, value)
    total = tl.sum(rows.to(tl.float32) * (normalizer * scale)[None, :], 1)
    total += tl.sum(weights.to(tl.float32), 1)
    if tl.max(exceeds.to(tl.int32), 0) > 0:
        for i in range(C):
            if tl.max(tl.where(place == i, exceeds.to(tl.int32), 0), 0) > 0:
                query = row_of(queries, i, C)
                among = visible & (place <= i)
                top = tl.max(tl.where(among[:, None], keys, LOWEST), 0)
                raised_row = query + tl.maximum(maximum, top)
                own = tl.max(raised_row, 0)
                products = products_of_row(query, keys, own, visible, i, C)
                weight = tl.sum(products, 1)
                lifted = tl.exp(query + maximum - own)
                row = tl.sum(weight[:, None] * value.to(tl.float32), 0)
                row += tl.sum(lifted[:, None] * numerator, 0)
                among_rows = place == i
                found = tl.where(among_rows[:, None], row[None, :], found)
                whole = tl.sum(weight, 0) + tl.sum(lifted * normalizer, 0)
                total = tl.where(among_rows, whole, total)
                shift = tl.where(among_rows, own, shift)
    return found, total, shift
