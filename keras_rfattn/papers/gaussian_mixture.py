"""A hybrid of estimators for overlapping clusters ("hybrid_gaussian_mixture")."""

import math

import keras
import numpy as np

from keras_rfattn.arguments import is_positive
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.papers.clustered import check_clusters, find_clusters
from keras_rfattn.papers.coefficients import Coefficient
from keras_rfattn.papers.complex_exponential import (
    ComplexExponential,
    MatrixExponential,
    diagonal_parts,
    exponential,
)
from keras_rfattn.papers.hybrid import Hybrid


@keras.saving.register_keras_serializable("keras_rfattn")
class PairCoefficient(Coefficient, MatrixExponential):
    """The coefficient `λ = exp(-‖Ax + A⁻¹y‖² / 2τ²)` of a pair of clusters.

    λ is 1 where `Ax + A⁻¹y = 0`. A is chosen so that both terms have equal root mean
    squares in the two clusters. It is a real diagonal matrix, because λ would leave
    [0, 1] for a complex one.

    Args:
        num_features: Number n of random vectors, twice the head dim by default.
        tau: Width τ > 0 of the coefficient, 1 by default.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `tau` is not positive,
            or `projection` is unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equations 93 to 96.
    """

    is_adaptive = False
    is_positive = True

    def __init__(self, num_features=None, tau=1.0, **kwargs):
        super().__init__(num_features, **kwargs)
        if not is_positive(tau):
            raise ValueError(f"`tau` must be positive. Received: tau={tau!r}.")
        self.tau = tau

    def _features(self, x, matrix, conjugation):
        u = conjugation * diagonal_parts(x / self.tau, matrix)[0]
        return exponential(self.project(u) - 2 * half_square(u))

    def get_config(self):
        return {**super().get_config(), "tau": self.tau}


class HybridGaussianMixture(Hybrid):
    """Hybrid with a real A for each pair of clusters and Gaussian coefficients.

    Each pair of clusters has an estimator with its own A. Its Gaussian coefficient is
    large where query and key are near the pair's centers, so that several pairs can
    contribute to one query and key. One minus the sum of the coefficients is the weight
    of a default estimator, which equals `FavorPlus`. `adapt` finds the centers by
    k-means, as in `HybridClustered`.

    Args:
        num_features: Number m of random vectors of each estimator, 16 by default.
        num_coefficients: Number n of random vectors of each coefficient, 4 by default.
        num_clusters: Pair of the number of query clusters and the number of key
            clusters, (2, 2) by default.
        tau: Width τ > 0 of the coefficients, 1 by default.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features`, `num_coefficients` or a number of clusters is not
            a positive integer, `tau` is not positive, or `projection` is unknown.
        ImportError: In `adapt`, if scikit-learn is missing.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), definition H.1.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.HybridGaussianMixture(4, 2, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> feature_map.is_calibrated
        True
    """

    is_adaptive = True

    def __init__(
        self, num_features=None, num_coefficients=None, num_clusters=(2, 2), tau=1.0,
        projection="orthogonal", seed=None, **kwargs,
    ):  # fmt: skip
        num_features = 16 if num_features is None else num_features
        n = 4 if num_coefficients is None else num_coefficients
        self.num_clusters = check_clusters(num_clusters)
        pairs = math.prod(self.num_clusters)
        options = {"projection": projection, "seed": 0}
        estimators = [
            ComplexExponential(num_features, form="real", **options)
            for _ in range(pairs + 1)
        ]
        coefficients = [PairCoefficient(n, tau=tau, **options) for _ in range(pairs)]
        super().__init__(estimators, coefficients, seed=seed, **kwargs)
        self.num_features, self.num_coefficients = num_features, n
        self.tau = tau

    def fit(self, samples):
        clusters = find_clusters(self, samples)
        pairs = zip(self.estimators[:-1], self.coefficients, strict=True)
        for pair, parts in enumerate(pairs):
            i, j = divmod(pair, self.num_clusters[1])
            a = np.stack([found.diagonal(i, j, is_real=True) for found in clusters])
            for part in parts:
                part.set_matrix(a)

    def get_config(self):
        return {
            **keras.layers.Layer.get_config(self),
            "num_features": self.num_features,
            "num_coefficients": self.num_coefficients,
            "num_clusters": list(self.num_clusters),
            "tau": self.tau,
            "projection": self.estimators[0].get_config()["projection"],
            "seed": self.seed,
        }
