"""Gaussian vectors whose directions repel each other as far as they can."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection
from keras_rfattn.projections.orthogonal import haar


@keras.saving.register_keras_serializable("keras_rfattn")
class Simplex(Projection):
    """Blocks of `dim` vectors with pairwise cosine `-1 / (dim - 1)`.

    The directions are the corners of a regular simplex, turned at random; the
    lengths are those of independent Gaussian vectors, so that each vector is
    `N(0, I)`.

    Args:
        seed: Non-negative integer.

    Reference:
        Reid et al., "Simplex Random Features" (2023).
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
