"""Gaussian vectors whose directions are spread in blocks of `dim` vectors."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection, gaussian_lengths


@keras.saving.register_keras_serializable("keras_rfattn")
class Orthogonal(Projection):
    """Blocks of `dim` orthogonal vectors, independent between blocks.

    The directions of a block are a Haar-distributed orthogonal matrix. It is the Q of a
    Gaussian matrix's QR decomposition, with every column multiplied by the sign of R's
    diagonal. Without that sign Q is not Haar-distributed (its diagonal keeps one sign),
    and every kernel estimate is biased by 7 to 40 percent.

    Args:
        norms: `"chi"` (default): each vector has the norm of an independent Gaussian
            vector, so that it is marginally `N(0, I)` and estimators stay unbiased.
            `"sqrt_dim"`: every norm is `sqrt(dim)`, which has a lower variance but a
            slight bias.
        seed: Non-negative integer. The same seed gives the same numbers.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), section 2.4;
        Likhosherstov et al., "Chefs' Random Tables" (2022), theorem 4.1.
    """

    def __init__(self, norms="chi", seed=0):
        if norms not in ("chi", "sqrt_dim"):
            raise ValueError(
                f"`norms` must be 'chi' or 'sqrt_dim'. Received: norms={norms!r}."
            )
        super().__init__(seed=seed)
        self.norms = norms

    def sample(self, generator, dim, count):
        blocks = -(-count // dim)
        rows = haar(generator, blocks, dim, dim).reshape(-1, dim)[:count]
        if self.norms == "sqrt_dim":
            return rows * np.sqrt(dim)
        return rows * gaussian_lengths(generator, count, dim)

    def get_config(self):
        return {**super().get_config(), "norms": self.norms}


def haar(generator, blocks, rows, columns):
    """Returns transposes of matrices whose orthonormal columns are uniform (Haar)."""
    q, r = np.linalg.qr(generator.standard_normal((blocks, rows, columns)))
    q = q * np.sign(np.einsum("bii->bi", r))[:, None, :]
    return q.swapaxes(-1, -2)
