"""Sums and products of estimated kernels, computed on their `Features`.

If φ estimates one kernel and ψ another, the concatenation of φ and ψ estimates the sum
of the kernels. If φ and ψ are independent, their tensor product estimates the product
of the kernels. A coefficient scales the features of one side only (queries or keys),
so that it may be negative. This equals the factor i on both sides that papers use.
"""

import math

from keras import ops

from keras_rfattn.ops.features import Features


def add(*features):
    """Returns features of the sum of the kernels, of shape `(..., Σ M)`."""
    values = None
    if any(f.is_signed for f in features):
        values = ops.concatenate([f.ones_or_values() for f in features], axis=-1)
    log_scale = ops.concatenate([_spread_scale(f) for f in features], axis=-1)
    return Features(values, log_scale)


def multiply(a, b):
    """Returns features of the product of two kernels, `(..., M_a · M_b)`."""
    values = None
    if a.is_signed or b.is_signed:
        values = _outer(a.ones_or_values(), b.ones_or_values(), ops.multiply)
    return Features(values, _outer(_spread_scale(a), _spread_scale(b), ops.add))


def scale(features, factor):
    """Multiplies the features of one side by a number, which scales the kernel."""
    if factor < 0:
        features = Features(-features.ones_or_values(), features.log_scale)
    return Features(features.values, features.log_scale + math.log(abs(factor)))


def _outer(a, b, combine):
    outer = combine(ops.expand_dims(a, -1), ops.expand_dims(b, -2))
    return ops.reshape(outer, (*ops.shape(outer)[:-2], a.shape[-1] * b.shape[-1]))


def _spread_scale(features):
    """Returns the exponents broadcast to one for each feature."""
    return ops.broadcast_to(features.log_scale, ops.shape(features.ones_or_values()))
