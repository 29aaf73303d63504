"""Real features for estimators whose exponents are complex."""

import math

from keras import ops

from keras_rfattn.ops.features import Features


def exponential(exponent, phase, is_key):
    """Returns real features for the complex `exp(exponent + i phase) / √m`.

    The products of real query and key features equal the real part of the products of
    the complex ones.

    Args:
        exponent: Real array of shape `(..., m)`.
        phase: Real array of shape `(..., m)`, or `None` for 0.
        is_key: Whether these are features of keys, whose imaginary part changes sign.

    Returns:
        `Features` of width m, or of width `2 m` if there is a phase.
    """
    exponent = exponent - math.log(exponent.shape[-1]) / 2
    if phase is None:
        return Features(None, exponent)
    sine = ops.sin(phase)
    values = ops.concatenate([ops.cos(phase), -sine if is_key else sine], axis=-1)
    return Features(values, ops.concatenate([exponent, exponent], axis=-1))
