"""The kernel `(q · k)^p` and its exact features ("polynomial")."""

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import refuse_vectors
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.base import without
from keras_rfattn.kernels import values
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import Polynomial as PolynomialKernel
from keras_rfattn.ops.kernel_attention import unit
from keras_rfattn.ops.not_finite import bounded
from keras_rfattn.ops.not_finite import spoils
from keras_rfattn.ops.precision import wide_dtype

DEFAULT_DEGREE = 4


class PolynomialFeatureMap(FeatureMap):
    """Base of maps for the weights `(q · k)^p / (1 + Σ (q · k)^p)`.

    Queries and keys pass a layer normalization each, shared by the heads, before they
    are scaled: with the default scale their product is `√head_dim` times their
    cosine. The 1 is part of the definition. All heads share the features.

    The paper has neither that scale nor two normalizations: there the product is
    `head_dim` times the cosine, which makes the 1 weigh `head_dim^{p/2}` times less.
    `is_scaled=False, shares_norm=True` is the paper's.

    Args:
        degree: The even degree p, 4 by default.
        is_scaled: Whether `q · k` is divided by `√head_dim`, as softmax attention's is.
        shares_norm: Whether queries and keys pass the same normalization.
        **kwargs: Of the next class in the bases.

    Raises:
        ValueError: If `degree` is not a positive even integer.

    Reference:
        Kacham et al., "PolySketchFormer: fast transformers via sketching polynomial
        kernels" (2024), section 2.1.
    """

    kernel = "polynomial"
    is_positive = False
    is_preparing = True

    def __init__(
        self, degree=DEFAULT_DEGREE, is_scaled=True, shares_norm=False, **kwargs
    ):
        super().__init__(**kwargs)
        is_integer = isinstance(degree, int) and not isinstance(degree, bool)
        if not is_integer or degree < 2 or degree % 2:
            raise ValueError(
                "`degree` must be a positive even integer. "
                f"Received: degree={degree!r}."
            )
        self.degree, self.is_scaled, self.shares_norm = degree, is_scaled, shares_norm
        self.query_norm = self._norm("query_norm")
        self.key_norm = self.query_norm if shares_norm else self._norm("key_norm")

    def _norm(self, name):
        return keras.layers.LayerNormalization(name=name, dtype="float32")

    @property
    def exact_kernel(self):
        return PolynomialKernel(self.degree)

    @property
    def features_per_scale(self):
        return 1

    def default_scale(self, head_dim):
        return super().default_scale(head_dim) if self.is_scaled else 1.0

    def build(self, input_shape):
        super().build(input_shape)
        for norm in (self.query_norm, self.key_norm):
            if not norm.built:
                norm.build((None, self.head_dim))

    def kernel_values(self, query, key):
        return values.polynomial(query, key, self.degree)

    def prepare(self, query, key):
        """Layer normalization of queries and keys, in float32."""
        return (
            norm(bounded(x)) + ops.cast(spoils(x), "float32")
            for norm, x in ((self.query_norm, query), (self.key_norm, key))
        )

    def get_config(self):
        config = {**super().get_config(), "degree": self.degree}
        # Left out where they say nothing new: fingerprints of older files.
        if not self.is_scaled:
            config["is_scaled"] = False
        if self.shares_norm:
            config["shares_norm"] = True
        return config


@keras.saving.register_keras_serializable("keras_rfattn")
class Polynomial(PolynomialFeatureMap):
    """The kernel itself: exact features `x^{⊗p}`, of width `head_dim^p`.

    Attention is computed by them for p = 2 and more than `head_dim²` keys, and
    quadratically otherwise, where they are wider than the sequence is long.

    Args:
        degree: The even degree p, 4 by default.
        num_features: Only `None`; the width is `head_dim ** degree`.
        projection: Only `None`.
    """

    has_exact_features = True

    def __init__(
        self, num_features=None, degree=DEFAULT_DEGREE, projection=None, **kwargs
    ):
        refuse_vectors(type(self), num_features, projection, "'polysketch'")
        super().__init__(degree, **kwargs)

    @property
    def is_exact(self):
        return self.degree > 2

    @property
    def output_dim(self):
        return self.head_dim**self.degree

    def key_features(self, x, stats=None):
        x, log_norm = unit(ops.cast(x, wide_dtype(x)))
        power = x
        for _ in range(self.degree // 2 - 1):
            power = ops.expand_dims(power, -1) * ops.expand_dims(x, -2)
            power = ops.reshape(power, (*ops.shape(x)[:-1], -1))
        return Squared(power, self.degree * log_norm)

    @classmethod
    def from_config(cls, config):
        return cls(**without(config, "projection"))

    def get_config(self):
        return {**super().get_config(), "num_features": None}
