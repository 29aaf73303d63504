"""NaN propagation: a token that is not finite must reach exactly the rows that see it.

Sums do not give this for free: 0 · NaN is NaN, and a maximum treats NaN differently
across backends. So a token that is not finite enters products as a finite one. A NaN
that stands for it (`spoiled`) is carried separately, and added to the outputs that see
the token.
"""

import keras
from keras import ops

from keras_rfattn.backend.precision import (
    clip,
    known_finite,
    largest_of,
    smallest_of,
    where,
    wide_dtype,
)
from keras_rfattn.ops.features import Marked, finite

# Entries of queries and keys beyond this are replaced by it: then their squares, summed
# over a head, stay far above `features.LOWEST`.
LARGEST = 1e13


def spoils(x):
    """Returns NaN for tokens `(..., D)` that are not finite, else 0: `(..., 1)`."""
    if known_finite(x, limit=float("inf")):
        return _none_spoiled(x)
    if keras.backend.backend() == "jax":
        import jax

        if jax.default_backend() == "cpu":
            return _times_zero(ops.stop_gradient(x))
    return _judged(x)


def _times_zero(x):
    # Finite numbers times 0 are 0, others are NaN. This product is XLA's fastest sum
    # over a token on a CPU.
    zeros = ops.zeros((x.shape[-1], 1), dtype=x.dtype)
    return ops.cast(ops.matmul(x, zeros), wide_dtype(x))


def _judged(x):
    found = where(_all_finite(x), 0.0, float("nan"))
    return ops.cast(found, wide_dtype(x))


def onward(spoiled):
    """Returns NaN from the first NaN on, `(..., S, 1)`, like a cumulative sum."""
    # XLA computes a cumulative sum in S² steps.
    position = ops.expand_dims(ops.arange(ops.shape(spoiled)[-2], dtype="int32"), 1)
    found = ops.where(ops.isnan(spoiled), position, position[-1:] + 1)
    first = smallest_of(found, axis=-2, keepdims=True)
    return where(position >= first, float("nan"), ops.zeros_like(spoiled))


def bounded(x):
    """Returns queries or keys clipped to ±`LARGEST`; tokens not finite become 0."""
    if known_finite(x, limit=LARGEST):
        return x
    # Clipped entries get no gradient, which costs less than computing one.
    cut = clip(ops.stop_gradient(x), -LARGEST, LARGEST)
    cut = ops.where(ops.abs(x) < LARGEST, x, cut)
    return where(_is_clean(x), cut, 0)


def flowing(x):
    """Returns `x` clipped as in `apart`, but with NaN left in, and `spoiled` all 0.

    Where all queries see all keys, the products themselves propagate the NaN.
    """
    cut = clip(ops.stop_gradient(x), -LARGEST, LARGEST)
    # `x - x` is 0 or NaN; a comparison with NaN may lose it.
    nan = ops.stop_gradient(x - x)
    return ops.where(ops.abs(x) < LARGEST, x, cut) + nan, _none_spoiled(x)


def finite_values(value):
    """Returns values `(..., V)` with 0 for tokens that are not finite."""
    if known_finite(value, limit=float("inf")):
        return value
    return where(_is_clean(value), value, 0)


def apart(x):
    """Returns `(bounded(x), spoils(x))`, with a single check if `x` is finite."""
    if known_finite(x, limit=LARGEST):
        return x, _none_spoiled(x)
    return bounded(x), spoils(x)


def values_apart(value):
    """Returns `(finite_values(value), spoils(value))`, checked once if finite."""
    if known_finite(value, limit=float("inf")):
        return value, _none_spoiled(value)
    return finite_values(value), spoils(value)


def _none_spoiled(x):
    return ops.zeros_like(x[..., :1], dtype=wide_dtype(x))


def _is_clean(x):
    """Returns whether each token is finite, `(..., 1)`, by the check of `spoils`."""
    if keras.backend.backend() == "jax":
        return ops.logical_not(ops.isnan(spoils(x)))
    return _all_finite(x)


def _all_finite(x):
    x = ops.abs(ops.stop_gradient(x))
    if keras.backend.backend() == "torch":
        # This takes fewer passes. PyTorch's maximum propagates NaN; that of XLA does
        # not.
        return largest_of(x, axis=-1, keepdims=True) < float("inf")
    return ops.all(x < float("inf"), axis=-1, keepdims=True)


def limited(features):
    """Returns `Marked` features whose exponents have differences that are not NaN."""
    features, spoiled = mark(features)
    return Marked(finite(features), spoiled)


def mark(features):
    """Returns `Marked` features for features that are NaN at tokens not finite."""
    if isinstance(features, Marked):
        return features
    spoiled = ops.isnan(features.log_scale[..., :1])
    log_scale = where(spoiled, 0, features.log_scale)
    features = features._replace(log_scale=log_scale)
    spoiled = where(spoiled, float("nan"), 0.0)
    return Marked(features, ops.cast(spoiled, log_scale.dtype))
