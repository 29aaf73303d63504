"""`Features`, the one type that feature maps hand to algorithms, and sums over it.

A feature is `values · exp(log_scale)` with `|values| <= 1`. The exponent is
carried, never applied, so that an algorithm can choose shifts that cancel between
numerator and denominator; nothing overflows, and no epsilon is needed.

The three functions below are all an algorithm is made of. `summarize` folds keys
and values into sums whose size does not depend on how many there were, each
feature relative to its own maximum. `read` looks queries up in such sums, with the
maxima absorbed into the query's exponent: the largest exponent becomes 0 and
meets a sum that holds a 1, so a denominator of a positive map is at least 1.
`combine` adds two readings of disjoint sets of keys.
"""

import keras
from keras import ops

from keras_rfattn.ops.backend import accumulated_matmul
from keras_rfattn.ops.backend import elementwise_max
from keras_rfattn.ops.spoiled import finite_values
from keras_rfattn.ops.spoiled import mark
from keras_rfattn.ops.spoiled import spoils
from keras_rfattn.ops.types import Features
from keras_rfattn.ops.types import Marked
from keras_rfattn.ops.types import Reading
from keras_rfattn.ops.types import Squared
from keras_rfattn.ops.types import Sums
from keras_rfattn.ops.types import self_tensor

# Stands for -inf in exponents. Finite, so that a difference of two is 0, not NaN.
LOWEST = -1e30

# Below this fraction of the sum of magnitudes a signed denominator is rounding
# noise in float32, whose resolution is 6e-8 per term.
GUARD = 1e-6


def finite(features):
    """Clips exponents to finite numbers, whose differences are no NaN; NaN stays."""
    log_scale = features.log_scale
    clipped = ops.clip(log_scale, LOWEST, -LOWEST)
    if keras.backend.backend() == "jax":
        # XLA may take the larger of NaN and a number to be the number.
        clipped = ops.where(ops.isnan(log_scale), log_scale, clipped)
    return features._replace(log_scale=clipped)


def admit(key, value, mask=None):
    """What `summarize` takes: hidden rows in no product, and no value not finite.

    Args:
        key: `Marked` of shape `(..., S, M)`.
        value: Array of shape `(..., S, V)`.
        mask: Boolean array of shape `(..., S)`, true for visible keys; hidden keys and
            values may hold anything.

    Returns:
        `Marked` features, whose mark tells of their values too, and the values.
    """
    value = hide(value, mask)
    spoiled = hide(key.spoiled, mask) + ops.cast(spoils(value), key.spoiled.dtype)
    return Marked(masked(key.features, mask), spoiled), finite_values(value)


def map_features(function, features):
    """Applies a function of one array to all parts of `Features` or `Marked`."""
    if features is None or not isinstance(features, tuple):
        return None if features is None else function(features)
    return type(features)(*(map_features(function, x) for x in features))


def plain(features):
    """`Features`, also of `Squared`: the r² features themselves."""
    return features.expanded() if isinstance(features, Squared) else features


def expand(features, shift, dtype):
    """`values * exp(log_scale - shift)`, computed wide and rounded once to `dtype`."""
    exponent = features.log_scale - shift
    if isinstance(features, Squared):
        # Half the exponent for each factor: r numbers are scaled, not r².
        exponent = exponent / 2
    scale = ops.exp(exponent)
    if features.values is not None:
        scale = scale * ops.cast(features.values, scale.dtype)
    if isinstance(features, Squared):
        scale = self_tensor(scale)
    return ops.cast(scale, dtype)


def masked_log_scale(key, mask):
    """Key exponents with hidden keys at `LOWEST`, so that no maximum sees them."""
    if mask is None:
        return key.log_scale
    return ops.where(mask[..., None], key.log_scale, LOWEST)


def masked(key, mask):
    """Keys whose hidden rows are in no product and no maximum."""
    values = None if key.values is None else hide(key.values, mask)
    return type(key)(values, masked_log_scale(key, mask))


def hide(array, mask):
    """Zeroes the hidden rows of `(..., S, ·)`; they may hold NaN."""
    return array if mask is None else ops.where(mask[..., None], array, 0)


def summarize(key, value, mask=None):
    """Sums keys and values over S.

    Args:
        key: `Marked` of shape `(..., S, M)`, as `admit` gives them.
        value: Array of shape `(..., S, V)`, likewise; its dtype is the compute dtype.
        mask: The mask given to `admit`.

    Returns:
        `Sums`, in float32 (float64 for float64 features).
    """
    key, spoiled = key
    maximum = ops.stop_gradient(ops.max(key.log_scale, axis=-2))
    shift = ops.expand_dims(maximum, -2)
    rows = expand(key, shift, value.dtype)
    scale = Features(None, key.log_scale)
    if key.values is None:
        # Where no key is visible the maximum is `LOWEST` too.
        rows = hide(rows, mask)
    numerator = accumulated_matmul(rows, value, transpose_a=True)
    dtype = numerator.dtype
    normalizer = ops.sum(ops.cast(rows, dtype), axis=-2)
    if key.values is None:
        magnitude = normalizer
    else:
        magnitude = ops.sum(hide(expand(scale, shift, dtype), mask), axis=-2)
    spoiled = ops.sum(ops.cast(spoiled[..., 0], dtype), axis=-1)
    return Sums(maximum, numerator, normalizer, magnitude, spoiled)


def merge_sums(a, b):
    """The sums over two disjoint sets of keys together."""
    maximum = elementwise_max(a.maximum, b.maximum)
    left, right = ops.exp(a.maximum - maximum), ops.exp(b.maximum - maximum)
    return Sums(
        maximum,
        a.numerator * left[..., None] + b.numerator * right[..., None],
        a.normalizer * left + b.normalizer * right,
        a.magnitude * left + b.magnitude * right,
        a.spoiled + b.spoiled,
    )


def settle(sums):
    """The first four `Sums`, with what was not finite in them."""
    numerator = sums.numerator + sums.spoiled[..., None, None]
    return sums.maximum, numerator, sums.normalizer, sums.magnitude


def rebase(sums, maximum):
    """The same sums relative to another `maximum`, at least their own."""
    factor = ops.exp(sums.maximum - maximum)
    return Sums(
        maximum,
        sums.numerator * factor[..., None],
        sums.normalizer * factor,
        sums.magnitude * factor,
        sums.spoiled,
    )


def query_shift(query, maximum):
    """The largest exponent each query meets: `(..., R)` from `(..., R, M)`."""
    exponent = query.log_scale + ops.expand_dims(maximum, -2)
    return ops.stop_gradient(ops.max(exponent, axis=-1))


def read(sums, query, shift, dtype):
    """Looks queries up in `sums`, but for their mark, which is added to the output.

    Args:
        sums: `Sums` with leading dimensions `(...)`.
        query: `Features` of shape `(..., R, M)`.
        shift: Array of shape `(..., R)`, at least `query_shift(query, maximum)`.
        dtype: Compute dtype of the products.

    Returns:
        A `Reading` relative to `shift`.
    """
    log_scale = query.log_scale + ops.expand_dims(sums.maximum, -2)
    shifted = query._replace(log_scale=log_scale)
    rows = expand(shifted, shift[..., None], dtype)
    numerator = accumulated_matmul(rows, ops.cast(sums.numerator, dtype))
    wide = numerator.dtype
    column = ops.cast(ops.expand_dims(sums.normalizer, -1), wide)
    denominator = accumulated_matmul(ops.cast(rows, wide), column)[..., 0]
    if query.values is None:
        bound = denominator
    else:
        scale = expand(Features(None, log_scale), shift[..., None], wide)
        column = ops.cast(ops.expand_dims(sums.magnitude, -1), wide)
        bound = accumulated_matmul(scale, column)[..., 0]
        if sums.magnitude.shape[-1] == 1:
            bound = bound * query.width
    return Reading(shift, numerator, denominator, bound)


def combine(a, b):
    """Adds the readings of two disjoint sets of keys by the same queries."""
    shift = elementwise_max(a.shift, b.shift)
    left, right = ops.exp(a.shift - shift), ops.exp(b.shift - shift)
    return Reading(
        shift,
        a.numerator * left[..., None] + b.numerator * right[..., None],
        a.denominator * left + b.denominator * right,
        a.bound * left + b.bound * right,
    )


def normalize(reading, features):
    """Numerator over denominator; 0 for a row that sees no key, as its numerator is.

    A positive map's denominator is used as it is. A signed map's denominator D can
    come near 0 by cancellation; with `bound = Σ_j Σ_m exp(log_scale_i + log_scale_j)`
    (every |value| taken as 1) it is replaced by

        sign(D) · max(|D|, GUARD · bound),  sign(0) = 1

    which needs sums alone, so that all algorithms agree. The 1 in the denominator of
    polynomial attention is `exp(-shift)` here.

    Args:
        reading: A `Reading`.
        features: What was read with, for `is_signed` and `has_offset`.
    """
    denominator = reading.denominator
    if features.is_signed:
        floor = GUARD * ops.stop_gradient(reading.bound)
        sign = ops.where(denominator < 0, -1.0, 1.0)
        sign = ops.cast(sign, denominator.dtype)
        denominator = sign * elementwise_max(ops.abs(denominator), floor)
    seen = reading.bound > 0
    if features.has_offset:
        # Of a sum of squares; below 0 it is rounding.
        denominator = elementwise_max(denominator, 0)
        shift = ops.where(seen, reading.shift, 0)
        denominator = denominator + ops.cast(ops.exp(-shift), denominator.dtype)
    denominator = ops.where(seen, denominator, 1)
    return reading.numerator / denominator[..., None]


def heads_first(features, num_kv_heads):
    """`(B, T, N, M)` features as `Marked` `(B, K, T · G, M)`, groups by token."""
    features, spoiled = mark(features)
    marked = Marked(finite(features), spoiled)
    return map_features(lambda x: split_heads(x, num_kv_heads), marked)


def split_heads(x, num_kv_heads):
    """`(B, T, N, ·)` as `(B, K, T · G, ·)`."""
    batch, length = ops.shape(x)[0], ops.shape(x)[1]
    num_heads, width = x.shape[2], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, length, num_kv_heads, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, num_kv_heads, length * groups, width))


def merge_heads(x, num_heads, length):
    """`(B, K, T · G, V)` back as `(B, T, N, V)`."""
    batch, num_kv_heads, width = ops.shape(x)[0], x.shape[1], x.shape[3]
    groups = num_heads // num_kv_heads
    if groups == 1:
        return ops.transpose(x, (0, 2, 1, 3))
    x = ops.reshape(x, (batch, num_kv_heads, length, groups, width))
    x = ops.transpose(x, (0, 2, 1, 3, 4))
    return ops.reshape(x, (batch, length, num_heads, width))


def heads_mask(key_mask):
    """`(B, S)` padding mask as booleans that broadcast over `(B, K, S)`."""
    return None if key_mask is None else ops.cast(key_mask, "bool")[:, None]


def representable(value):
    """`value` in a dtype that can hold features beside it: float16 as float32.

    float16's smallest number is exp(-17), and features span far more.
    """
    if keras.backend.standardize_dtype(value.dtype) == "float16":
        return ops.cast(value, "float32")
    return value
