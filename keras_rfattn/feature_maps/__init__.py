"""Feature maps, and the registry that finds them by their names in the literature."""

from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.exponential import (
    Exponential,
    FavorPlus,
    FavorPP,
    FavorPPDense,
    FavorPPLearned,
)
from keras_rfattn.feature_maps.hedgehog import Hedgehog
from keras_rfattn.feature_maps.polynomial import PolySketchLearned
from keras_rfattn.feature_maps.projected import (
    Activation,
    ProjectedFeatureMap,
    RandomFeatureMap,
)
from keras_rfattn.feature_maps.registry import (
    DEFAULT,
    FEATURE_MAPS,
    class_of,
    deserialize,
    get,
    list,
    name_of,
    register,
    resolve,
    serialize,
)
from keras_rfattn.feature_maps.weights import Adaptive

# `papers/` adds its own maps when it is imported.
FEATURE_MAPS.update({
    "favorplus": FavorPlus,
    "favorpp": FavorPP,
    "favorpp_dense": FavorPPDense,
    "favorpp_learned": FavorPPLearned,
    "hedgehog": Hedgehog,
    "polysketch_learned": PolySketchLearned,
})  # fmt: skip

__all__ = [
    "Activation",
    "Adaptive",
    "DEFAULT",
    "Exponential",
    "FEATURE_MAPS",
    "FavorPP",
    "FavorPPDense",
    "FavorPPLearned",
    "FavorPlus",
    "FeatureMap",
    "Hedgehog",
    "PolySketchLearned",
    "ProjectedFeatureMap",
    "RandomFeatureMap",
    "class_of",
    "deserialize",
    "get",
    "list",
    "name_of",
    "register",
    "resolve",
    "serialize",
]
