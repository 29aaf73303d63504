"""Trigonometric features of softmax ("favor"), and positive ones in ± pairs."""

import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.feature_maps.exponential import FavorPlus
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features
from keras_rfattn.papers.second_moments import (
    log_moment_generalized_exponential,
    log_moment_positive_pair,
)


@keras.saving.register_keras_serializable("keras_rfattn")
class Favor(ProjectedFeatureMap):
    """Trigonometric features: `exp(‖x‖²/2) [cos(w·x), sin(w·x)] / √m`.

    The products of query and key features average to the softmax kernel
    `exp(x · y)`, because `E cos(w·(x - y)) = exp(-‖x - y‖²/2)` (Rahimi and Recht,
    2007). The estimate is precise where x and y are close. Features are not positive,
    so that the denominator of attention can come near 0;
    `keras_rfattn.ops.sums.normalize` describes the guard. Features have width `2 m`.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; `num_features` is m.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021),
        equation 6; "Hybrid Random Features" (2022), equation 4.

    Examples:
        >>> from keras_rfattn import layers, papers
        >>> feature_map = papers.Favor(num_features=32, seed=0)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 64)
    """

    is_positive = False
    is_generalized_exponential = True

    @property
    def output_dim(self):
        return 2 * self.num_features

    @property
    def features_per_scale(self):
        return 1

    def key_features(self, x):
        angles = self.project(x)
        values = ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)
        return Features(values, half_square(x) - math.log(self.num_features) / 2)

    def sign(self, head=0):
        return -1

    def log_moment(self, head=0):
        return lambda x, y: log_moment_generalized_exponential(x, y, 0, -1)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPlusPair(FavorPlus):
    """FAVOR+ with both signs of each of m vectors: `exp(±w·x - ‖x‖²/2) / √(2m)`.

    This is the hyperbolic estimator, "Hybrid Random Features" (2022), equation 3. The
    width is `2 m`. The arguments are those of `FavorPlus`.
    """

    @property
    def output_dim(self):
        return 2 * self.num_features

    def random_vectors(self, draw):
        vectors = super().random_vectors(draw)
        return np.concatenate([vectors, -vectors], axis=-1)

    def log_moment(self, head=0):
        # A draw is a pair.
        return log_moment_positive_pair
