"""Sums over the features of keys: the operations that every algorithm is built from.

`summarize` adds up keys and values. The size of the sums does not depend on the number
of keys, and each feature is taken relative to its own maximum. `read` computes what
queries see in such sums. It adds the maxima to the query's exponents and shifts them,
so that the largest exponent is 0; its feature meets a sum that contains a 1, so the
denominator of a positive map is at least 1. `combine` adds two readings of disjoint
sets of keys, and `normalize` divides.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_rfattn.backend import accumulated_matmul, clip, where, wide_dtype
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.masks import hide

# A signed denominator below this fraction of the sum of magnitudes is rounding noise in
# float32, whose resolution is 6e-8 per term.
GUARD = 1e-6


class Sums(NamedTuple):
    """Keys and values summed per feature, relative to `maximum` (see `summarize`)."""

    maximum: Any  # (..., M or 1)
    numerator: Any  # (..., V, M): the layout in which products write and read it
    normalizer: Any  # (..., M)
    magnitude: Any  # (..., M or 1): the normalizer with every |value| taken as 1


class Reading(NamedTuple):
    """Weighted sums of the values, as R rows of queries see them."""

    shift: Any  # (..., R); the sums are relative to its exponential
    numerator: Any  # (..., R, V)
    denominator: Any  # (..., R)
    bound: Any  # (..., R): the denominator with every |value| of features taken as 1


def admit(key, value, mask=None):
    """Computes key features `(..., S, M)` and hides masked rows, for `summarize`."""
    return key.hidden(mask).compute(), hide(value, mask)


def summarize(key, value, mask=None):
    """Returns the `Sums` over S tokens, in float32 (float64 for float64 features)."""
    maximum = ops.stop_gradient(ops.amax(key.log_scale, axis=-2))
    shift = ops.expand_dims(maximum, -2)
    rows = key.expand(shift, value.dtype)
    # The normalizer is computed as the sum of a value that is 1, and 0 for a hidden
    # key: where no key is visible the maximum is `LOWEST` too, so features do not
    # vanish.
    ones = hide(ops.ones_like(value[..., :1]), mask)
    both = ops.concatenate([value, ones], axis=-1)
    # Values come first because XLA on a CPU is half as fast if the wide operand is
    # transposed.
    both = accumulated_matmul(both, rows, transpose_a=True)
    numerator, normalizer = both[..., :-1, :], both[..., -1, :]
    if key.is_exponential:
        magnitude = normalizer
    else:
        magnitude = ops.sum(hide(key.magnitudes(shift, both.dtype), mask), axis=-2)
    return Sums(maximum, numerator, normalizer, magnitude)


def merge_sums(a, b):
    """Returns the sums over two disjoint sets of keys together."""
    maximum = clip(a.maximum, low=b.maximum)
    pairs = zip(rebase(a, maximum)[1:], rebase(b, maximum)[1:], strict=True)
    return Sums(maximum, *(x + y for x, y in pairs))


def cast_sums(sums, like):
    """Returns sums in the dtypes of other sums."""
    return Sums(*(ops.cast(x, y.dtype) for x, y in zip(sums, like, strict=True)))


def rebase(sums, maximum):
    """Returns the sums relative to another `maximum` that is at least their own."""
    factor = ops.exp(sums.maximum - maximum)
    return Sums(
        maximum,
        sums.numerator * ops.expand_dims(factor, -2),
        sums.normalizer * factor,
        sums.magnitude * factor,
    )


def read(sums, query, dtype):
    """Returns the `Reading` of `sums` by query `Features` `(..., R, M)`."""
    raised = query.raised(ops.expand_dims(sums.maximum, -2)).compute()
    shift = ops.stop_gradient(ops.amax(raised.log_scale, axis=-1))
    rows = raised.expand(ops.expand_dims(shift, -1), dtype)
    return look_up(sums, raised, rows, shift)


def look_up(sums, query, rows, shift):
    """Computes `read` for queries whose exponents already contain the sums' maxima."""
    wide, dtype = wide_dtype(sums.numerator), rows.dtype
    last = ops.cast(ops.expand_dims(sums.normalizer, -2), wide)
    if keras.backend.standardize_dtype(dtype) == wide:
        both = ops.concatenate([ops.cast(sums.numerator, wide), last], axis=-2)
        both = accumulated_matmul(rows, both, transpose_b=True)
        numerator, denominator = both[..., :-1], both[..., -1]
    else:
        numerator = ops.cast(sums.numerator, dtype)
        numerator = accumulated_matmul(rows, numerator, transpose_b=True)
        rows = ops.cast(rows, wide)
        denominator = accumulated_matmul(rows, last, transpose_b=True)[..., 0]
    if query.is_exponential:
        bound = denominator
    else:
        scale = query.magnitudes(ops.expand_dims(shift, -1), wide)
        column = ops.cast(ops.expand_dims(sums.magnitude, -1), wide)
        bound = accumulated_matmul(scale, column)[..., 0]
        if sums.magnitude.shape[-1] == 1:
            bound = bound * query.width
    return Reading(shift, numerator, denominator, bound)


def weigh(weights, value, shift, bounds=None):
    """Returns the `Reading` of values `(..., S, V)` by weights `(..., R, S)`."""
    # The numerator and the denominator use the same rounded weights, so that their
    # ratio is a weighted average.
    rounded = ops.cast(weights, value.dtype)
    numerator = accumulated_matmul(rounded, value)
    denominator = ops.sum(ops.cast(rounded, numerator.dtype), axis=-1)
    bound = denominator if bounds is None else ops.sum(bounds, axis=-1)
    return Reading(shift, numerator, denominator, bound)


def combine(a, b):
    """Adds the readings of two disjoint sets of keys by the same queries."""
    shift = clip(a.shift, low=b.shift)
    pairs = (lowered(x, shift - x.shift)[1:] for x in (a, b))
    return Reading(shift, *(x + y for x, y in zip(*pairs, strict=True)))


def lowered(reading, rise):
    """Returns a reading relative to a shift that is larger by `rise`, `(..., R)`."""
    factor = ops.exp(-rise)
    return Reading(
        reading.shift + rise,
        reading.numerator * ops.expand_dims(factor, -1),
        reading.denominator * factor,
        reading.bound * factor,
    )


def normalize(reading, features, dtype=None):
    """Divides the numerator by the `guarded` denominator: `(..., R, V)`."""
    dtype = reading.numerator.dtype if dtype is None else dtype
    return ops.cast(reading.numerator / guarded(reading, features), dtype)


def guarded(reading, features):
    """Returns the denominator of each row, `(..., R, 1)`; 1 if it sees no key."""
    denominator = reading.denominator
    if features.is_signed:
        floor = GUARD * ops.stop_gradient(reading.bound)
        sign = where(denominator < 0, -1.0, 1.0)
        sign = ops.cast(sign, denominator.dtype)
        denominator = sign * clip(ops.abs(denominator), low=floor)
    seen = reading.bound > 0
    if features.has_offset:
        # The denominator is a sum of squares, so it is below 0 only by rounding.
        denominator = clip(denominator, low=0)
        shift = where(seen, reading.shift, 0)
        denominator = denominator + ops.cast(ops.exp(-shift), denominator.dtype)
    return ops.expand_dims(where(seen, denominator, 1), -1)


def no_sums(lead, width, value_dim, scale_dim, dtype="float32", scale_dtype="float32"):
    """Returns the sums over no key, for leading sizes `lead`."""
    return Sums(
        ops.zeros((*lead, scale_dim), dtype=scale_dtype) + LOWEST,
        ops.zeros((*lead, value_dim, width), dtype=dtype),
        ops.zeros((*lead, width), dtype=dtype),
        ops.zeros((*lead, scale_dim), dtype=dtype),
    )


def no_sums_of(key, lead, value):
    """Returns the sums over no key, for leading sizes, features and values."""
    sizes = key.width, value.shape[-1], key.scale_width
    return no_sums(lead, *sizes, wide_dtype(value), key.scale_dtype)


def emptied(sums):
    """Returns the sums over no key, in the shapes and dtypes of other sums."""
    rest = (ops.zeros_like(x) for x in sums[1:])
    return Sums(ops.zeros_like(sums.maximum) + LOWEST, *rest)
