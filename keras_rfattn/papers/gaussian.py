"""The hybrid whose coefficient is a Gaussian of the distance ("hybrid_gaussian")."""

import math
from functools import partial

import keras
from keras import ops

from keras_rfattn.arguments import is_positive
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.papers.algebra import scale
from keras_rfattn.papers.coefficients import Coefficient
from keras_rfattn.papers.hybrid import Bipolar


@keras.saving.register_keras_serializable("keras_rfattn")
class GaussianCoefficient(Coefficient, ProjectedFeatureMap):
    """The coefficient `λ = (1 - exp(-σ² ‖x - y‖² / 2)) / ρ`.

    It is estimated by trigonometric features. With `ρ = 1 - exp(-2 σ² r²)`, λ is 1 for
    opposite x and y of norm r, and 0 for equal x and y.

    Args:
        num_features: Number n of random vectors, twice the head dim by default.
            Features have width `2 n`.
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
    """

    def __init__(self, num_features=None, sigma=1.0, radius=None, **kwargs):
        super().__init__(num_features, **kwargs)
        given = [sigma] if radius is None else [sigma, radius]
        if not all(is_positive(x) for x in given):
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

    def query_features(self, x):
        return scale(self.key_features(x), -1 / self.rho)

    def key_features(self, x):
        angles = self.sigma * self.project(x)
        values = ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)
        return self.averaged(values)

    def get_config(self):
        return {**super().get_config(), "sigma": self.sigma, "radius": self.radius}


class HybridGaussian(Bipolar):
    """The normalized bipolar Gaussian hybrid: `λ = (1 - exp(-σ²‖x-y‖²/2)) / ρ`.

    Let r be `radius` and `ρ = 1 - exp(-2 σ² r²)`. For inputs of norm r, the variance is
    0 at angle 0 between query and key. Features have width `4 m (2 n + 1)` with a
    radius, and `2 m (4 n + 1)` without.

    Args:
        num_features: Number m of random vectors of both estimators, 16 by default.
        num_coefficients: Number n of random vectors of the coefficient, 7 by default.
        sigma: Smoothness σ of the coefficient, 1 by default.
        radius: Norm r of queries and keys, for which λ is 1 if they are opposite. With
            `None` (default), ρ = 1.
        shared: Whether both estimators use the same vectors. Defaults to `True`.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` or `num_coefficients` is not a positive integer,
            `sigma` or `radius` is not positive, or `projection` is unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), section F.

    Examples:
        >>> from keras_rfattn import layers, papers
        >>> feature_map = papers.HybridGaussian(4, num_coefficients=2, seed=0)
        >>> layer = layers.MultiHeadAttention(
        ...     2, 8, feature_map=feature_map, temperature=0.5)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 72)
    """

    def __init__(
        self, num_features=None, num_coefficients=None, sigma=1.0, radius=None, **kwargs
    ):
        coefficient = partial(GaussianCoefficient, sigma=sigma, radius=radius)
        super().__init__(coefficient, num_features, num_coefficients, **kwargs)
        self.sigma, self.radius = sigma, radius

    def get_config(self):
        return {**super().get_config(), "sigma": self.sigma, "radius": self.radius}
