"""Coefficients of hybrid estimators, which are estimated by random features too."""

import math

import keras
from keras import ops

from keras_rfattn.backend import where
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features
from keras_rfattn.papers.algebra import scale


class Coefficient:
    """Mixin of maps that estimate `λ(x, y) = constant + E ρ_q(x) · ρ_k(y)`.

    The mixin must come before `FeatureMap` in the bases. `query_features` computes ρ_q
    and `key_features` computes ρ_k. The constant is separate because a hybrid needs λ
    and `1 - Σ λ`, and merges the constants of the latter ("Hybrid Random Features",
    lemma 2.3).

    Examples:
        >>> from keras_rfattn import feature_maps, papers
        >>> class Half(papers.Coefficient,
        ...            feature_maps.ProjectedFeatureMap):
        ...     constant = 0.5
        ...     def key_features(self, x):
        ...         return self.averaged(0 * self.project(x))
        >>> Half(num_features=1, seed=0).constant
        0.5
    """

    kernel = "coefficient"
    is_positive = False
    is_symmetric = False
    constant = 0.0

    def averaged(self, values):
        """Returns features whose products average the values over random vectors."""
        log_scale = -math.log(self.num_features) / 2
        return Features(values, ops.full_like(values[..., :1], log_scale))


@keras.saving.register_keras_serializable("keras_rfattn")
class AngularCoefficient(Coefficient, ProjectedFeatureMap):
    """The coefficient `λ = θ / π` for the angle θ between x and y.

    It is estimated from the signs of projections on n random vectors τ:
    `λ̂ = ½ - (1/2n) Σ sgn(τ·x) sgn(τ·y)`.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; `num_features` is n.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equation 19.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.AngularCoefficient(num_features=16, seed=0)
        >>> feature_map.build((None, None, 2, 8))
        >>> features = feature_map.key_features(np.ones((1, 10, 2, 8), "float32"))
        >>> tuple(features.values.shape)
        (1, 10, 2, 16)
    """

    constant = 0.5

    def query_features(self, x):
        return scale(self.key_features(x), -1 / 2)

    def key_features(self, x):
        projected = self.project(x)
        signs = ops.cast(where(projected < 0, -1.0, 1.0), projected.dtype)
        return self.averaged(signs)
