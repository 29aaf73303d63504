"""Independent Gaussian vectors."""

import keras

from keras_rfattn.projections.base import Projection


@keras.saving.register_keras_serializable("keras_rfattn")
class Gaussian(Projection):
    """Independent draws from `N(0, I)`.

    Args:
        seed: Non-negative integer. The same seed gives the same numbers.

    Raises:
        ValueError: If `seed` is not a non-negative integer.

    Examples:
        >>> projection = keras_rfattn.projections.Gaussian(seed=0)
        >>> vectors = projection((2, 8, 32))  # heads, head dim, number of vectors
        >>> tuple(vectors.shape)
        (2, 8, 32)
    """

    def sample(self, generator, dim, count):
        return generator.standard_normal((count, dim))
