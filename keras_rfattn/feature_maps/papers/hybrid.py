"""The hybrid whose coefficient is a Gaussian of the distance ("hybrid_gaussian")."""

import keras

from keras_rfattn.feature_maps.hybrid import Bipolar
from keras_rfattn.feature_maps.papers.coefficients import GaussianCoefficient


@keras.saving.register_keras_serializable("keras_rfattn")
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
        >>> from keras_rfattn import feature_maps, layers
        >>> feature_map = feature_maps.HybridGaussian(4, num_coefficients=2, seed=0)
        >>> layer = layers.MultiHeadAttention(
        ...     2, 8, feature_map=feature_map, temperature=0.5)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 72)
    """

    def __init__(
        self, num_features=None, num_coefficients=None, sigma=1.0, radius=None, **kwargs
    ):
        def coefficient(*args, **kwargs):
            return GaussianCoefficient(*args, sigma=sigma, radius=radius, **kwargs)

        super().__init__(coefficient, num_features, num_coefficients, **kwargs)
        self.sigma, self.radius = sigma, radius

    def get_config(self):
        return {**super().get_config(), "sigma": self.sigma, "radius": self.radius}
