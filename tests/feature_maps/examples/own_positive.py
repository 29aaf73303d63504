import math

import keras

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.ops import Features

SIGN = -1  # of half the square; a test plants the other


@feature_maps.register("own_positive")
@keras.saving.register_keras_serializable("my_project")
class OwnPositive(feature_maps.ProjectedFeatureMap):
    """Features `exp(w · x - ‖x‖²/2) / √m`."""

    def key_features(self, x):
        exponent = self.project(x) + SIGN * half_square(x)
        return Features(None, exponent - math.log(self.num_features) / 2)
