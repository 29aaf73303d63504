"""Gaussian vectors whose directions are the corners of simplices."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection, gaussian_lengths, haar


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
    """

    def sample(self, generator, dim, count):
        blocks = -(-count // dim)
        if dim == 1:
            corners = np.ones((1, 1))
        else:
            corners = (np.eye(dim) - 1 / dim) / np.sqrt(1 - 1 / dim)
        rows = (corners @ haar(generator, blocks, dim, dim)).reshape(-1, dim)[:count]
        return rows * gaussian_lengths(generator, count, dim)
