"""Feature maps, and the registry that finds them by their names in the literature."""

from keras_rfattn.feature_maps.activation import (
    Activation,
    Elementwise,
    Elu,
    PlainRelu,
    ProjectedElu,
    Relu,
)
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.coefficients import AngularCoefficient, Coefficient
from keras_rfattn.feature_maps.conditioned import Conditioned, FavorPPDense
from keras_rfattn.feature_maps.exponential import Exponential
from keras_rfattn.feature_maps.favor import Favor
from keras_rfattn.feature_maps.favorplus import FavorPlus
from keras_rfattn.feature_maps.favorpp import FavorPP
from keras_rfattn.feature_maps.favorpp_learned import FavorPPLearned
from keras_rfattn.feature_maps.hedgehog import Hedgehog
from keras_rfattn.feature_maps.hybrid import Hybrid, HybridAngular
from keras_rfattn.feature_maps.papers.clustered import HybridClustered
from keras_rfattn.feature_maps.papers.complex_exponential import ComplexExponential
from keras_rfattn.feature_maps.papers.gaussian import (
    GaussianCoefficient,
    HybridGaussian,
)
from keras_rfattn.feature_maps.papers.gaussian_mixture import (
    HybridGaussianMixture,
    PairCoefficient,
)
from keras_rfattn.feature_maps.papers.gerf import Gerf
from keras_rfattn.feature_maps.papers.kernel_coefficient import KernelCoefficient
from keras_rfattn.feature_maps.papers.monomials import (
    Geometric,
    GeometricPositive,
    Poisson,
    PoissonPositive,
)
from keras_rfattn.feature_maps.polynomial import Polynomial
from keras_rfattn.feature_maps.polysketch import (
    PolySketch,
    PolySketchLearned,
    PolySketchLinear,
)
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap, RandomFeatureMap
from keras_rfattn.feature_maps.registry import (
    FEATURE_MAPS,
    deserialize,
    get,
    list,
    name_of,
    register,
    resolve,
    serialize,
)

# `papers/` adds its own maps by `register`, as other packages do.
FEATURE_MAPS.update({
    "favor": Favor,
    "favorplus": FavorPlus,
    "favorpp": FavorPP,
    "favorpp_dense": FavorPPDense,
    "favorpp_learned": FavorPPLearned,
    "hedgehog": Hedgehog,
    "hybrid_angular": HybridAngular,
    "polynomial": Polynomial,
    "polysketch": PolySketch,
    "polysketch_learned": PolySketchLearned,
    "polysketch_linear": PolySketchLinear,
    "elu": Elu,
    "relu": Relu,
})  # fmt: skip

__all__ = [
    "Activation",
    "Adaptive",
    "AngularCoefficient",
    "Coefficient",
    "ComplexExponential",
    "Conditioned",
    "Elementwise",
    "Elu",
    "Exponential",
    "FEATURE_MAPS",
    "Favor",
    "FavorPP",
    "FavorPPDense",
    "FavorPPLearned",
    "FavorPlus",
    "FeatureMap",
    "GaussianCoefficient",
    "Geometric",
    "GeometricPositive",
    "Gerf",
    "Hedgehog",
    "Hybrid",
    "HybridAngular",
    "HybridClustered",
    "HybridGaussian",
    "HybridGaussianMixture",
    "KernelCoefficient",
    "PairCoefficient",
    "PlainRelu",
    "Poisson",
    "PoissonPositive",
    "PolySketch",
    "PolySketchLearned",
    "PolySketchLinear",
    "Polynomial",
    "ProjectedElu",
    "ProjectedFeatureMap",
    "RandomFeatureMap",
    "Relu",
    "deserialize",
    "get",
    "list",
    "name_of",
    "register",
    "resolve",
    "serialize",
]
