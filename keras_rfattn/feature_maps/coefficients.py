"""Coefficients of hybrid estimators, as random features of their own."""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.algebra import scale
from keras_rfattn.feature_maps.arguments import is_number
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.precision import where


class Coefficient:
    """Mixin of maps that estimate `λ(x, y) = constant + E ρ_q(x) · ρ_k(y)`.

    Comes before a `FeatureMap` in the bases. `query_features` and `key_features` are
    ρ_q and ρ_k. The constant is kept apart because a hybrid needs λ and `1 - Σ λ`,
    whose constants merge (HRF, lemma 2.3).
    """

    kernel = "coefficient"
    is_positive = False
    is_symmetric = False
    constant = 0.0

    def averaged(self, values):
        """Values as features whose products are a mean over the random vectors."""
        log_scale = -math.log(self.num_features) / 2
        return Features(values, ops.full_like(values[..., :1], log_scale))


@keras.saving.register_keras_serializable("keras_rfattn")
class AngularCoefficient(Coefficient, ProjectedFeatureMap):
    """`λ = θ / π`: the angle between x and y, by signs of projections.

    `λ̂ = ½ - (1/2n) Σ sgn(τ·x) sgn(τ·y)`.

    Args:
        num_features: Number n of random vectors.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equation 19.
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
    """`λ = (1 - exp(-σ² ‖x - y‖² / 2)) / ρ`, by trigonometric features.

    With `ρ = 1 - exp(-2 σ² r²)` it is 1 for opposite x and y of length r, and 0 for
    equal ones.

    Args:
        num_features: Number n of random vectors; width `2 n`.
        sigma: σ > 0.
        radius: r > 0, or `None` for ρ = 1.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equations 67 to 70.
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
