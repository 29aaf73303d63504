"""Estimators for the papers' tables, registered like a third party's maps."""

from keras_rfattn.feature_maps.papers.clustered import HybridClustered
from keras_rfattn.feature_maps.papers.coefficients import GaussianCoefficient
from keras_rfattn.feature_maps.papers.complex_exponential import ComplexExponential
from keras_rfattn.feature_maps.papers.gaussian_mixture import (
    HybridGaussianMixture,
    PairCoefficient,
)
from keras_rfattn.feature_maps.papers.gerf import Gerf
from keras_rfattn.feature_maps.papers.hybrid import HybridGaussian
from keras_rfattn.feature_maps.papers.kernel_coefficient import KernelCoefficient
from keras_rfattn.feature_maps.papers.monomials import (
    Geometric,
    GeometricPositive,
    Poisson,
    PoissonPositive,
)
from keras_rfattn.feature_maps.registry import register

register("gerf", Gerf)
register("poisson", Poisson)
register("poisson_positive", PoissonPositive)
register("geometric", Geometric)
register("geometric_positive", GeometricPositive)
register("complex_exponential", ComplexExponential)
register("hybrid_gaussian", HybridGaussian)
register("hybrid_clustered", HybridClustered)
register("hybrid_gaussian_mixture", HybridGaussianMixture)

__all__ = [
    "ComplexExponential",
    "GaussianCoefficient",
    "Geometric",
    "GeometricPositive",
    "Gerf",
    "HybridClustered",
    "HybridGaussian",
    "HybridGaussianMixture",
    "KernelCoefficient",
    "PairCoefficient",
    "Poisson",
    "PoissonPositive",
]
