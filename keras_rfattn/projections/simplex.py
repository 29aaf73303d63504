"""Gaussian vectors whose directions in a block are as far apart as possible."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection
from keras_rfattn.projections.orthogonal import haar


@keras.saving.register_keras_serializable("keras_rfattn")
class Simplex(Projection):
    """Blocks of `dim` vectors with pairwise cosine `-1 / (dim - 1)`.

    The directions are the corners of a regular simplex in a random rotation. The norms
    are those of independent Gaussian vectors, so each vector is `N(0, I)`.

    Args:
        seed: Non-negative integer. The same seed gives the same numbers.

    Raises:
        ValueError: If `seed` is not a non-negative integer.

    Reference:
        Reid et al., "Simplex Random Features" (2023).

    Examples:
        >>> projection = keras_rfattn.projections.Simplex(seed=0)
        >>> vectors = projection((2, 8, 32))  # heads, head dim, number of vectors
        >>> tuple(vectors.shape)
        (2, 8, 32)
    """

    def sample(self, generator, dim, count):
        blocks = -(-count // dim)
        if dim == 1:
            corners = np.ones((1, 1))
        else:
            corners = (np.eye(dim) - 1 / dim) / np.sqrt(1 - 1 / dim)
        rows = (corners @ haar(generator, blocks, dim)).reshape(blocks * dim, dim)
        lengths = np.linalg.norm(generator.standard_normal((count, dim)), axis=-1)
        return rows[:count] * lengths[:, None]
