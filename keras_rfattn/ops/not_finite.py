"""What is not finite: it must reach the rows that see it, and no other.

But 0 · NaN is NaN, and a largest number may be NaN or not. So a token that is not
finite enters products as some finite one, and a NaN that stands for it (`spoiled`) is
carried beside and added to the output of what sees it.
"""

import keras
from keras import ops

from keras_rfattn.ops.features import Marked
from keras_rfattn.ops.features import finite
from keras_rfattn.ops.precision import clip
from keras_rfattn.ops.precision import known_finite
from keras_rfattn.ops.precision import largest_of
from keras_rfattn.ops.precision import smallest_of
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.precision import wide_dtype

# Entries of queries and keys beyond this count as this: their squares, summed over a
# head, stay far above `features.LOWEST`.
LARGEST = 1e13


def spoils(x):
    """NaN for tokens `(..., D)` that are not finite, else 0: `(..., 1)`."""
    if known_finite(x, limit=float("inf")):
        return _none_spoiled(x)
    if keras.backend.backend() == "jax":
        import jax

        if jax.default_backend() == "cpu":
            return _times_zero(ops.stop_gradient(x))
    return _judged(x)


def _times_zero(x):
    # Finite numbers times 0 are 0, others NaN: XLA's fastest sum over a token on a CPU.
    zeros = ops.zeros((x.shape[-1], 1), dtype=x.dtype)
    return ops.cast(ops.matmul(x, zeros), wide_dtype(x))


def _judged(x):
    found = where(_all_finite(x), 0.0, float("nan"))
    return ops.cast(found, wide_dtype(x))


def onward(spoiled):
    """NaN from the first NaN on, `(..., S, 1)`: what a cumulative sum would make."""
    # Which XLA computes in S² steps.
    position = ops.expand_dims(ops.arange(ops.shape(spoiled)[-2], dtype="int32"), 1)
    found = ops.where(ops.isnan(spoiled), position, position[-1:] + 1)
    first = smallest_of(found, axis=-2, keepdims=True)
    return where(position >= first, float("nan"), ops.zeros_like(spoiled))


def bounded(x):
    """Queries or keys with entries in ±`LARGEST`, and 0 for tokens not finite."""
    if known_finite(x, limit=LARGEST):
        return x
    # Without gradient where something is cut off, which costs less than one.
    cut = clip(ops.stop_gradient(x), -LARGEST, LARGEST)
    cut = ops.where(ops.abs(x) < LARGEST, x, cut)
    return where(_is_clean(x), cut, 0)


def flowing(x):
    """`(x, spoiled)` as of `apart`, but NaN for what is not finite, and no mark.

    Where all queries see all keys it is carried by the products themselves.
    """
    cut = clip(ops.stop_gradient(x), -LARGEST, LARGEST)
    # A number less itself is 0, or NaN, which a comparison may lose.
    nan = ops.stop_gradient(x - x)
    return ops.where(ops.abs(x) < LARGEST, x, cut) + nan, _none_spoiled(x)


def finite_values(value):
    """Values `(..., V)` with 0 for tokens that are not finite."""
    if known_finite(value, limit=float("inf")):
        return value
    return where(_is_clean(value), value, 0)


def apart(x):
    """`(bounded(x), spoils(x))`, looked at once where it is finite."""
    if known_finite(x, limit=LARGEST):
        return x, _none_spoiled(x)
    return bounded(x), spoils(x)


def values_apart(value):
    """`(finite_values(value), spoils(value))`, likewise."""
    if known_finite(value, limit=float("inf")):
        return value, _none_spoiled(value)
    return finite_values(value), spoils(value)


def _none_spoiled(x):
    return ops.zeros_like(x[..., :1], dtype=wide_dtype(x))


def _is_clean(x):
    """Whether a token is finite, `(..., 1)`, from what `spoils` has looked at."""
    if keras.backend.backend() == "jax":
        return ops.logical_not(ops.isnan(spoils(x)))
    return _all_finite(x)


def _all_finite(x):
    x = ops.abs(ops.stop_gradient(x))
    if keras.backend.backend() == "torch":
        # Fewer passes. The largest of NaN and others is NaN here, but not in XLA.
        return largest_of(x, axis=-1, keepdims=True) < float("inf")
    return ops.all(x < float("inf"), axis=-1, keepdims=True)


def limited(features):
    """`Marked`, with exponents whose differences are no NaN."""
    features, spoiled = mark(features)
    return Marked(finite(features), spoiled)


def mark(features):
    """`Marked`, of features that are NaN where a token was not finite."""
    if isinstance(features, Marked):
        return features
    spoiled = ops.isnan(features.log_scale[..., :1])
    log_scale = where(spoiled, 0, features.log_scale)
    features = features._replace(log_scale=log_scale)
    spoiled = where(spoiled, float("nan"), 0.0)
    return Marked(features, ops.cast(spoiled, log_scale.dtype))
