"""Sums and products of feature maps' kernels, on `Features`.

If φ estimates a kernel and ψ another, the concatenation of both estimates the sum
and their tensor product the product (of independent ones). A coefficient scales one
side only, so that it may be negative; a factor i on both sides, as papers write it,
amounts to that.
"""

import math

from keras import ops

from keras_rfattn.ops.features import Features


def add(*features):
    """Features of the sum of the kernels: `(..., Σ M)`."""
    values = None
    if any(f.is_signed for f in features):
        values = ops.concatenate([f.ones_or_values() for f in features], axis=-1)
    log_scale = ops.concatenate([f.spread_scale() for f in features], axis=-1)
    return Features(values, log_scale)


def multiply(a, b):
    """Features of the product of two kernels: `(..., M_a · M_b)`."""
    values = None
    if a.is_signed or b.is_signed:
        values = _outer(a.ones_or_values(), b.ones_or_values(), ops.multiply)
    return Features(values, _outer(a.spread_scale(), b.spread_scale(), ops.add))


def scale(features, factor):
    """Features times a number: the kernel is scaled by what one side is."""
    if factor < 0:
        features = Features(-features.ones_or_values(), features.log_scale)
    return Features(features.values, features.log_scale + math.log(abs(factor)))


def constant(x, factor):
    """One feature that is `factor` for every token of `x`, `(..., 1)`."""
    zero = ops.zeros_like(x[..., :1])
    return scale(Features(None, zero), factor)


def _outer(a, b, combine):
    outer = combine(ops.expand_dims(a, -1), ops.expand_dims(b, -2))
    return ops.reshape(outer, (*ops.shape(outer)[:-2], a.shape[-1] * b.shape[-1]))


def exponential(exponent, phase, is_key):
    """`exp(exponent + i phase) / √m`, whose products' real part is meant.

    Args:
        exponent: Real array of shape `(..., m)`.
        phase: Likewise, or `None` for 0.
        is_key: Whether the imaginary part changes sign.

    Returns:
        `Features` of width m, or `2 m` with a phase.
    """
    exponent = exponent - math.log(exponent.shape[-1]) / 2
    if phase is None:
        return Features(None, exponent)
    sine = ops.sin(phase)
    values = ops.concatenate([ops.cos(phase), -sine if is_key else sine], axis=-1)
    return Features(values, ops.concatenate([exponent, exponent], axis=-1))
