"""The exact features of the kernel `(q · k)^p` ("polynomial")."""

import keras
from keras import ops

from keras_rfattn.feature_maps.polynomial import DEFAULT_DEGREE, PolynomialFeatureMap
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import unit
from keras_rfattn.papers.activation import check_no_num_features


@keras.saving.register_keras_serializable("keras_rfattn")
class Polynomial(PolynomialFeatureMap):
    """Exact features `x^{⊗p}` of the polynomial kernel, of width `head_dim^p`.

    For p = 2 and more than `head_dim²` keys, attention is computed with the features,
    in linear time. Otherwise it is computed with the kernel, in quadratic time. For
    p > 2 this is always so, because features are usually more numerous than keys.

    Args:
        num_features: Must be `None`, because the width is `head_dim ** degree`.
        degree: The even degree p, 4 by default.
        seed: Unused.

    Raises:
        ValueError: If `num_features` is given, or `degree` is not a positive even
            integer.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), section 2.1.
    """

    has_exact_features = True

    def __init__(self, num_features=None, degree=DEFAULT_DEGREE, **kwargs):
        check_no_num_features(type(self), num_features)
        super().__init__(degree, **kwargs)

    @property
    def is_exact(self):
        return self.degree > 2

    @property
    def output_dim(self):
        return self.head_dim**self.degree

    def key_features(self, x):
        x, log_norm = unit(x)
        power = x
        for _ in range(self.degree // 2 - 1):
            power = ops.expand_dims(power, -1) * ops.expand_dims(x, -2)
            power = ops.reshape(power, (*ops.shape(x)[:-1], -1))
        return Squared(power, self.degree * log_norm)
