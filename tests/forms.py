"""Synthetic feature maps, one for each form of features that algorithms meet.

Algorithms know a map only by the form of its features, so their tests need no other
maps. `tests/feature_maps/test_contracts.py` tests that real maps agree with algorithms.
"""

import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.ops import Features, Polynomial
from keras_rfattn.ops.features import Squared

WIDTH = 24


def project(x, seed, width=WIDTH):
    """Returns the products of `x` with the same random vectors in all heads."""
    vectors = np.random.default_rng(seed).normal(size=(x.shape[-1], width))
    # Keras multiplies matrices of float64 in float32 on some backends.
    return ops.cast(ops.matmul(x, ops.cast(vectors, x.dtype)), x.dtype)


class Form(feature_maps.FeatureMap):
    """A map of one form, which estimates no kernel and has no weights."""

    output_dim = features_per_scale = WIDTH
    is_unbiased = False


class Positive(Form):
    """Positive features: every feature is the exponential of its own exponent."""

    def key_features(self, x):
        return Features(None, project(x, 0) - half_square(x))


class Signed(Form):
    """Signed features that share one exponent for each token."""

    is_positive = False
    features_per_scale = 1

    def key_features(self, x):
        angles = project(x, 0, WIDTH // 2) / 2
        values = ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)
        return Features(values, half_square(x) / 4)


class SignedApart(Form):
    """Signed features, each of which has its own exponent."""

    is_positive = False

    def key_features(self, x):
        values = ops.cos(project(x, 0) / 2)
        return Features(values, project(x, 1) / 2 - half_square(x) / 4)


class SquaredForm(Form):
    """Features whose products are squares, with a 1 in the denominator of attention."""

    kernel = "polynomial"
    is_positive = False
    degree = 2
    output_dim = 16
    features_per_scale = 1
    exact_kernel = Polynomial(degree)

    def key_features(self, x):
        sketch = project(x, 0, 4)
        # Zeros have no direction.
        square = ops.sum(ops.square(sketch), axis=-1, keepdims=True) + 1e-12
        return Squared(sketch / ops.sqrt(square), ops.log(square))


FORMS = {
    "positive": Positive,
    "signed": Signed,
    "signed_apart": SignedApart,
    "squared": SquaredForm,
}
