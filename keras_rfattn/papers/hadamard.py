"""Nearly orthogonal vectors from Hadamard matrices and random signs."""

import keras
import numpy as np

from keras_rfattn.arguments import is_integer
from keras_rfattn.projections.base import Projection, gaussian_lengths


@keras.saving.register_keras_serializable("keras_rfattn")
class Hadamard(Projection):
    """Rows of `H D₁ H D₂ H D₃`, with the lengths of Gaussian vectors.

    H is the normalized Hadamard matrix whose size p is the next power of two, and each
    D is a diagonal matrix of random signs. A block of p rows is orthogonal in p
    dimensions, and only the first `dim` entries of each row are kept. A transform takes
    `p log p` operations instead of `p²`. The entries have mean 0 and variance 1 and are
    uncorrelated, but they become normal only as p grows, so estimators on few
    dimensions are biased.

    Args:
        num_factors: Number of factors `H D`. With one factor the entries of a row
            differ only in sign; the paper uses three.
        seed: Non-negative integer. The same seed gives the same numbers.

    Raises:
        ValueError: If `num_factors` is not a positive integer.

    Reference:
        Yu et al., "Orthogonal Random Features" (2016), structured variant.

    Examples:
        >>> projection = keras_rfattn.papers.Hadamard(num_factors=3, seed=0)
        >>> vectors = projection((2, 8, 32))  # heads, head dim, number of vectors
        >>> tuple(vectors.shape)
        (2, 8, 32)
    """

    is_gaussian = False

    def __init__(self, num_factors=3, seed=0):
        if not is_integer(num_factors) or num_factors < 1:
            raise ValueError(
                "`num_factors` of a Hadamard projection must be a positive integer. "
                f"Received: num_factors={num_factors!r}."
            )
        super().__init__(seed=seed)
        self.num_factors = num_factors

    def sample(self, generator, dim, count):
        size = 1 << (dim - 1).bit_length()
        blocks = -(-count // size)
        rows = np.broadcast_to(np.eye(size), (blocks, size, size))
        for _ in range(self.num_factors):
            signs = generator.choice((-1.0, 1.0), size=(blocks, 1, size))
            rows = hadamard_transform(rows * signs)
        rows = rows.reshape(-1, size)[:count]
        return (rows * gaussian_lengths(generator, count, size))[:, :dim]

    def get_config(self):
        return {**super().get_config(), "num_factors": self.num_factors}


def hadamard_transform(x):
    """Returns `x H` over the last axis, of power-of-two length; H is orthogonal."""
    size = x.shape[-1]
    width = 1
    while width < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(*x.shape)
        width *= 2
    return x / np.sqrt(size)
