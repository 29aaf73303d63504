"""The kernel `(q · k)^p` and its exact features ("polynomial").

The sum in the denominator is over all keys that the query sees, and the 1 is part of
the definition. Queries and keys first pass through a layer normalization each, which
all heads share, so that `q · k` is `√head_dim` times their cosine. The paper
("PolySketchFormer", Kacham et al., 2024, section 2.1) has one normalization for both,
and does not divide the product by `√head_dim`.
"""

import keras
from keras import ops

from keras_rfattn.arguments import check_no_num_features, is_integer
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.kernels import values
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import Polynomial as PolynomialKernel
from keras_rfattn.ops.kernel_attention import unit

DEFAULT_DEGREE = 4


class PolynomialFeatureMap(FeatureMap):
    """Base class for polynomial attention, with weights `(q·k)^p / (1 + Σ (q·k)^p)`."""

    kernel = "polynomial"
    is_positive = False
    is_preparing = True
    features_per_scale = 1

    def __init__(self, degree=DEFAULT_DEGREE, **kwargs):
        super().__init__(**kwargs)
        if not is_integer(degree) or degree < 2 or degree % 2:
            raise ValueError(
                "`degree` must be a positive even integer. "
                f"Received: degree={degree!r}."
            )
        self.degree = degree
        self.query_norm = keras.layers.LayerNormalization(dtype="float32")
        self.key_norm = keras.layers.LayerNormalization(dtype="float32")

    @property
    def exact_kernel(self):
        return PolynomialKernel(self.degree)

    def build(self, input_shape):
        super().build(input_shape)
        for norm in (self.query_norm, self.key_norm):
            norm.build((None, self.head_dim))

    def kernel_values(self, query, key):
        return values.polynomial(query, key, self.degree)

    def prepare(self, query, key):
        """Applies the layer normalizations to queries and keys, in float32."""
        return self.query_norm(query), self.key_norm(key)

    def get_config(self):
        return {**super().get_config(), "degree": self.degree}


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
