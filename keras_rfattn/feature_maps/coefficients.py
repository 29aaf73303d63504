"""Coefficients of hybrid estimators, which are estimated by random features too."""

import math

import keras
from keras import ops

from keras_rfattn.backend.precision import where
from keras_rfattn.feature_maps.algebra import scale
from keras_rfattn.feature_maps.arguments import is_number
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features


class Coefficient:
    """Mixin of maps that estimate `λ(x, y) = constant + E ρ_q(x) · ρ_k(y)`.

    The mixin must come before `FeatureMap` in the bases. `query_features` computes ρ_q
    and `key_features` computes ρ_k. The constant is separate because a hybrid needs λ
    and `1 - Σ λ`, and merges the constants of the latter ("Hybrid Random Features",
    lemma 2.3).

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> class Half(feature_maps.Coefficient,
        ...            feature_maps.ProjectedFeatureMap):
        ...     constant = 0.5
        ...     def key_features(self, x, stats=None):
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
        num_features: Number n of random vectors τ, 256 by default.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `projection` is
            unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equation 19.

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> feature_map = feature_maps.AngularCoefficient(num_features=16, seed=0)
        >>> feature_map.build((None, None, 2, 8))
        >>> features = feature_map.key_features(np.ones((1, 10, 2, 8), "float32"))
        >>> tuple(features.values.shape)
        (1, 10, 2, 16)
    """

    constant = 0.5
    assumes_equal_lengths = True

    def query_features(self, x, stats=None):
        return scale(self.key_features(x), -1 / 2)

    def key_features(self, x, stats=None):
        projected = self.project(x)
        signs = ops.cast(where(projected < 0, -1.0, 1.0), projected.dtype)
        return self.averaged(signs)


@keras.saving.register_keras_serializable("keras_rfattn")
class GaussianCoefficient(Coefficient, ProjectedFeatureMap):
    """The coefficient `λ = (1 - exp(-σ² ‖x - y‖² / 2)) / ρ`.

    It is estimated by trigonometric features. With `ρ = 1 - exp(-2 σ² r²)`, λ is 1 for
    opposite x and y of norm r, and 0 for equal x and y.

    Args:
        num_features: Number n of random vectors, 256 by default. Features have width
            `2 n`.
        sigma: Positive number σ. A larger σ makes λ grow faster with the distance.
            Defaults to 1.
        radius: Norm r > 0 of queries and keys, which sets ρ. With `None` (default),
            ρ = 1.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `sigma` or `radius` is
            not positive, or `projection` is unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equations 67 to 70.

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> feature_map = feature_maps.GaussianCoefficient(16, radius=2.0, seed=0)
        >>> feature_map.build((None, None, 2, 8))
        >>> features = feature_map.key_features(np.ones((1, 10, 2, 8), "float32"))
        >>> tuple(features.values.shape)
        (1, 10, 2, 32)
    """

    assumes_equal_lengths = True

    def __init__(self, num_features=None, sigma=1.0, radius=None, **kwargs):
        super().__init__(num_features, **kwargs)
        given = [sigma] if radius is None else [sigma, radius]
        if not all(is_number(x) and x > 0 for x in given):
            raise ValueError(
                "`sigma` and `radius` must be positive. Received: "
                f"sigma={sigma!r}, radius={radius!r}."
            )
        self.sigma, self.radius = sigma, radius

    @property
    def output_dim(self):
        return 2 * self.num_features

    @property
    def rho(self):
        """The normalizing constant ρ."""
        if self.radius is None:
            return 1.0
        return -math.expm1(-2 * (self.sigma * self.radius) ** 2)

    @property
    def constant(self):
        return 1 / self.rho

    def query_features(self, x, stats=None):
        return scale(self.key_features(x), -1 / self.rho)

    def key_features(self, x, stats=None):
        angles = self.sigma * self.project(x)
        values = ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)
        return self.averaged(values)

    def get_config(self):
        return {**super().get_config(), "sigma": self.sigma, "radius": self.radius}
