"""Quasi-Monte-Carlo: normal quantiles of a scrambled Halton sequence."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection


@keras.saving.register_keras_serializable("keras_rfattn")
class Halton(Projection):
    """The first points of a randomly scrambled Halton sequence, made normal.

    Each vector is `N(0, I)`, and together they fill the space more evenly than
    independent draws in the first few dimensions. Needs SciPy.

    Args:
        seed: Non-negative integer.

    Reference:
        Avron et al., "Quasi-Monte Carlo Feature Maps for Shift-Invariant Kernels"
        (2016).
    """

    def sample(self, generator, dim, count):
        from scipy import special
        from scipy.stats import qmc

        points = qmc.Halton(dim, scramble=True, seed=generator).random(count)
        # A point of exactly 0 would be infinite.
        return special.ndtri(np.clip(points, 1e-12, 1 - 1e-12))
