"""Estimators that exist for the tables of papers, and the theory about them.

Maps and projections are found by the same names as those of the core, whose registries
import this package when one of its names is first asked for.
"""

from keras_rfattn.feature_maps.registry import register
from keras_rfattn.papers.activation import Elu, Relu
from keras_rfattn.papers.clustered import HybridClustered
from keras_rfattn.papers.coefficients import AngularCoefficient, Coefficient
from keras_rfattn.papers.complex_exponential import ComplexExponential
from keras_rfattn.papers.counts import Counts, GeometricCounts, PoissonCounts
from keras_rfattn.papers.favor import Favor, FavorPlusPair
from keras_rfattn.papers.gaussian import GaussianCoefficient, HybridGaussian
from keras_rfattn.papers.gaussian_mixture import HybridGaussianMixture, PairCoefficient
from keras_rfattn.papers.gerf import Gerf
from keras_rfattn.papers.hadamard import Hadamard
from keras_rfattn.papers.halton import Halton
from keras_rfattn.papers.hybrid import Hybrid, HybridAngular
from keras_rfattn.papers.kernel_coefficient import KernelCoefficient
from keras_rfattn.papers.kernel_features import KernelFeatures
from keras_rfattn.papers.monomials import (
    Geometric,
    GeometricPositive,
    Poisson,
    PoissonPositive,
)
from keras_rfattn.papers.polynomial import Polynomial
from keras_rfattn.papers.simplex import Simplex
from keras_rfattn.papers.sketch import PolySketch, PolySketchLinear
from keras_rfattn.projections import PROJECTIONS

MAPS = {
    "complex_exponential": ComplexExponential,
    "elu": Elu,
    "favor": Favor,
    "geometric": Geometric,
    "geometric_positive": GeometricPositive,
    "gerf": Gerf,
    "hybrid_angular": HybridAngular,
    "hybrid_clustered": HybridClustered,
    "hybrid_gaussian": HybridGaussian,
    "hybrid_gaussian_mixture": HybridGaussianMixture,
    "poisson": Poisson,
    "poisson_positive": PoissonPositive,
    "polynomial": Polynomial,
    "polysketch": PolySketch,
    "polysketch_linear": PolySketchLinear,
    "relu": Relu,
}
for _name, _cls in MAPS.items():
    register(_name, _cls)
PROJECTIONS.update({"hadamard": Hadamard, "halton": Halton, "simplex": Simplex})

__all__ = [
    "AngularCoefficient",
    "Coefficient",
    "ComplexExponential",
    "Counts",
    "Elu",
    "Favor",
    "FavorPlusPair",
    "GaussianCoefficient",
    "Geometric",
    "GeometricCounts",
    "GeometricPositive",
    "Gerf",
    "Hadamard",
    "Halton",
    "Hybrid",
    "HybridAngular",
    "HybridClustered",
    "HybridGaussian",
    "HybridGaussianMixture",
    "KernelCoefficient",
    "KernelFeatures",
    "PairCoefficient",
    "Poisson",
    "PoissonCounts",
    "PoissonPositive",
    "PolySketch",
    "PolySketchLinear",
    "Polynomial",
    "Relu",
    "Simplex",
]
