"""The kernel `(q · k)^p` and its exact features ("polynomial")."""

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import is_integer, refuse_vectors
from keras_rfattn.feature_maps.base import FeatureMap, without
from keras_rfattn.kernels import values
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import Polynomial as PolynomialKernel
from keras_rfattn.ops.kernel_attention import unit

DEFAULT_DEGREE = 4


class PolynomialFeatureMap(FeatureMap):
    """Base class for polynomial attention, with weights `(q·k)^p / (1 + Σ (q·k)^p)`.

    The sum is over all keys that the query sees, and the 1 is part of the definition.
    Before they are scaled, queries and keys each pass through a layer normalization of
    their own, which all heads share. With the default scale, `q · k` is `√head_dim`
    times the cosine between q and k. All heads use the same feature function.

    The paper uses no scale, and one normalization for both queries and keys. There
    `q · k` is `head_dim` times the cosine, so that the 1 weighs `head_dim^{p/2}` times
    less. Pass `is_scaled=False, shares_norm=True` for the paper's definition.

    Args:
        degree: The even degree p, 4 by default.
        is_scaled: Whether `q · k` is divided by `√head_dim`, as in softmax attention.
            Defaults to `True`.
        shares_norm: Whether queries and keys share one layer normalization. Defaults to
            `False`.
        **kwargs: Arguments that are passed on to the next base class.

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
        if not is_integer(degree) or degree < 2 or degree % 2:
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
        """Applies the layer normalizations to queries and keys, in float32."""
        return self.query_norm(query), self.key_norm(key)

    def get_config(self):
        config = {**super().get_config(), "degree": self.degree}
        # Default values are left out, so that fingerprints equal those of older files.
        if not self.is_scaled:
            config["is_scaled"] = False
        if self.shares_norm:
            config["shares_norm"] = True
        return config


@keras.saving.register_keras_serializable("keras_rfattn")
class Polynomial(PolynomialFeatureMap):
    """Exact features `x^{⊗p}` of the polynomial kernel, of width `head_dim^p`.

    For p = 2 and more than `head_dim²` keys, attention is computed with the features,
    in linear time. Otherwise it is computed with the kernel, in quadratic time. For
    p > 2 this is always so, because features are usually more numerous than keys.

    Args:
        num_features: Must be `None`, because the width is `head_dim ** degree`.
        degree: The even degree p, 4 by default.
        projection: Must be `None`, because the map has no random vectors.
        **kwargs: Further arguments of `PolynomialFeatureMap`.

    Raises:
        ValueError: If `num_features` or `projection` is given, or `degree` is not a
            positive even integer.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), section 2.1.

    Examples:
        >>> from keras_rfattn import feature_maps, layers
        >>> feature_map = feature_maps.Polynomial(degree=2)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 64)
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

    def key_features(self, x):
        x, log_norm = unit(x)
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
