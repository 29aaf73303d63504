"""Feature maps, and the registry that knows them by the literature's names."""

import difflib

import keras

from keras_rfattn.feature_maps.activation import Activation
from keras_rfattn.feature_maps.activation import Elu
from keras_rfattn.feature_maps.activation import Relu
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.clustered import HybridClustered
from keras_rfattn.feature_maps.coefficients import AngularCoefficient
from keras_rfattn.feature_maps.coefficients import Coefficient
from keras_rfattn.feature_maps.coefficients import GaussianCoefficient
from keras_rfattn.feature_maps.complex_exponential import ComplexExponential
from keras_rfattn.feature_maps.conditioned import Conditioned
from keras_rfattn.feature_maps.conditioned import FavorPPDense
from keras_rfattn.feature_maps.discrete import Geometric
from keras_rfattn.feature_maps.discrete import GeometricPositive
from keras_rfattn.feature_maps.discrete import Poisson
from keras_rfattn.feature_maps.discrete import PoissonPositive
from keras_rfattn.feature_maps.gaussian_mixture import HybridGaussianMixture
from keras_rfattn.feature_maps.gaussian_mixture import PairCoefficient
from keras_rfattn.feature_maps.generalized_exponential import FavorPP
from keras_rfattn.feature_maps.gerf import Gerf
from keras_rfattn.feature_maps.hybrid import Hybrid
from keras_rfattn.feature_maps.hybrid import HybridAngular
from keras_rfattn.feature_maps.hybrid import HybridGaussian
from keras_rfattn.feature_maps.polynomial import Polynomial
from keras_rfattn.feature_maps.polysketch import PolySketch
from keras_rfattn.feature_maps.polysketch import PolySketchLearned
from keras_rfattn.feature_maps.positive import FavorPlus
from keras_rfattn.feature_maps.trigonometric import Favor

FEATURE_MAPS = {
    "favor": Favor,
    "favorplus": FavorPlus,
    "favorpp": FavorPP,
    "favorpp_dense": FavorPPDense,
    "gerf": Gerf,
    "poisson": Poisson,
    "poisson_positive": PoissonPositive,
    "geometric": Geometric,
    "geometric_positive": GeometricPositive,
    "complex_exponential": ComplexExponential,
    "hybrid_angular": HybridAngular,
    "hybrid_gaussian": HybridGaussian,
    "hybrid_clustered": HybridClustered,
    "hybrid_gaussian_mixture": HybridGaussianMixture,
    "polynomial": Polynomial,
    "polysketch": PolySketch,
    "polysketch_learned": PolySketchLearned,
    "elu": Elu,
    "relu": Relu,
}

__all__ = [
    "Activation",
    "Adaptive",
    "AngularCoefficient",
    "Coefficient",
    "ComplexExponential",
    "Conditioned",
    "Elu",
    "FEATURE_MAPS",
    "Favor",
    "FavorPP",
    "FavorPPDense",
    "FavorPlus",
    "FeatureMap",
    "GaussianCoefficient",
    "Geometric",
    "GeometricPositive",
    "Gerf",
    "Hybrid",
    "HybridAngular",
    "HybridClustered",
    "HybridGaussian",
    "HybridGaussianMixture",
    "PairCoefficient",
    "Poisson",
    "PoissonPositive",
    "PolySketch",
    "PolySketchLearned",
    "Polynomial",
    "Relu",
    "deserialize",
    "get",
    "list",
    "register",
    "serialize",
]


def get(identifier, **arguments):
    """Resolves a feature map.

    Args:
        identifier: A registered name, a `FeatureMap` or its serialized config.
        **arguments: Constructor arguments for a map given by name; those that are
            `None` are left at the map's default.

    Returns:
        A `FeatureMap`. One given as an object is returned as it is.

    Raises:
        ValueError: If the name is unknown, or `arguments` are given for a map that
            already has its own.
        TypeError: If `identifier` is of another type.
    """
    arguments = {k: v for k, v in arguments.items() if v is not None}
    if isinstance(identifier, str):
        if identifier not in FEATURE_MAPS:
            close = difflib.get_close_matches(identifier, FEATURE_MAPS, n=1, cutoff=0)
            raise ValueError(
                f"`feature_map` must be one of {list()}. "
                f"Received: feature_map={identifier!r}. "
                f"Did you mean {close[0]!r}?"
            )
        return FEATURE_MAPS[identifier](**arguments)
    if isinstance(identifier, dict):
        identifier = deserialize(identifier)
    if not isinstance(identifier, FeatureMap):
        raise TypeError(
            f"`feature_map` must be a name ({', '.join(list())}), a `FeatureMap` or "
            f"its config. Received: feature_map={identifier!r} of type "
            f"{type(identifier).__name__}."
        )
    if arguments:
        raise ValueError(
            f"{sorted(arguments)} must be set on the feature map itself. Received: "
            f"feature_map={identifier!r} and {arguments}."
        )
    return identifier


def register(name, cls=None):
    """Adds a feature map to the registry, as a call or as a class decorator.

    Args:
        name: The name users will give.
        cls: A subclass of `FeatureMap`, or `None` to get a decorator. It must be
            registered with `keras.saving.register_keras_serializable`, or it is
            registered here under `keras_rfattn>ClassName`.

    Returns:
        The class, or the decorator.

    Raises:
        ValueError: If the name is taken by another class.
        TypeError: If `cls` is not a subclass of `FeatureMap`.
    """
    if cls is None:
        return lambda cls: register(name, cls)
    if not isinstance(cls, type) or not issubclass(cls, FeatureMap):
        raise TypeError(
            f"`cls` must be a subclass of `FeatureMap`. Received: cls={cls!r}."
        )
    if FEATURE_MAPS.get(name, cls) is not cls:
        raise ValueError(
            f"The name {name!r} is taken by {FEATURE_MAPS[name].__name__}. "
            "Choose another."
        )
    registered = keras.saving.get_registered_name(cls)
    if keras.saving.get_registered_object(registered) is not cls:
        keras.saving.register_keras_serializable("keras_rfattn")(cls)
    FEATURE_MAPS[name] = cls
    return cls


def list():
    """The registered names, sorted."""
    return sorted(FEATURE_MAPS)


def name_of(feature_map):
    """The registered name of a map's class, or the class name.

    Args:
        feature_map: A `FeatureMap`, built or not.
    """
    names = {cls: name for name, cls in FEATURE_MAPS.items()}
    return names.get(type(feature_map), type(feature_map).__name__)


def serialize(feature_map):
    """A `FeatureMap` as a config dict; the layer that owns the map builds it.

    Args:
        feature_map: A `FeatureMap`. Its weights are not part of the config.
    """
    config = keras.saving.serialize_keras_object(feature_map)
    config.pop("build_config", None)
    return config


def deserialize(config):
    """A `FeatureMap`, not built, from its config dict.

    Args:
        config: What `serialize` gave.
    """
    return keras.saving.deserialize_keras_object(config)
