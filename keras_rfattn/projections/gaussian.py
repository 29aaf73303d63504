"""Independent Gaussian vectors."""

import keras

from keras_rfattn.projections.base import Projection


@keras.saving.register_keras_serializable("keras_rfattn")
class Gaussian(Projection):
    """Independent draws from `N(0, I)`."""

    def sample(self, generator, dim, count):
        return generator.standard_normal((count, dim))
