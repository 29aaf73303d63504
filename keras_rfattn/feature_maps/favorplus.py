"""Positive random features of the softmax kernel ("favorplus")."""

import math

import keras
from keras import ops

from keras_rfattn.arguments import check_flag
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.feature_maps.exponential import Exponential
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.kernels.variance import (
    log_moment_generalized_exponential,
    log_moment_positive_pair,
)
from keras_rfattn.ops.deferred import Exponents


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPlus(Exponential, ProjectedFeatureMap):
    """FAVOR+, positive features: `exp(w·x - ‖x‖²/2) / √m`.

    The products of query and key features average to the softmax kernel
    `exp(x · y)`. The estimate is precise where x and y point in opposite directions.
    Its relative variance grows like `exp(‖x + y‖²)`.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        pair: Whether each vector is used with both signs (the hyperbolic estimator,
            equation 3 of "Hybrid Random Features"), which makes the width `2 m`.
            Defaults to `False`.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `pair` is not a
            boolean, or `projection` is unknown.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), lemma 1;
        "Hybrid Random Features" (2022), equation 3.

    Examples:
        >>> from keras_rfattn import feature_maps, layers
        >>> feature_map = feature_maps.FavorPlus(num_features=32, pair=True, seed=0)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 64)
    """

    is_generalized_exponential = True

    def __init__(self, num_features=None, pair=False, **kwargs):
        super().__init__(num_features, **kwargs)
        check_flag("pair", pair)
        self.pair = bool(pair)

    @property
    def output_dim(self):
        return (2 if self.pair else 1) * self.num_features

    def exponents(self, method, x, stats=None):
        vectors = ops.convert_to_tensor(self.vectors)
        if self.pair:
            vectors = ops.concatenate([vectors, -vectors], axis=-1)
        bias = ops.zeros((1, self.num_heads, 1, self.output_dim), dtype=x.dtype)
        return Exponents(x, ops.expand_dims(vectors, 0), bias)

    def common_exponent(self, method, x, stats=None):
        return -half_square(x) - math.log(self.output_dim) / 2

    def log_moment(self, head=0, stats=None):
        if self.pair:
            return log_moment_positive_pair
        return log_moment_generalized_exponential

    def get_config(self):
        return {**super().get_config(), "pair": self.pair}
