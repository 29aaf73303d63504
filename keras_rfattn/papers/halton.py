"""Quasi-Monte-Carlo vectors: normal quantiles of a randomized Halton sequence."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection

RANDOMIZATIONS = ("scramble", "start")
# Upper end of random starting points. This is far more than the number of combinations
# of the first digits of the dimensions.
LAST_START = 2**48


@keras.saving.register_keras_serializable("keras_rfattn")
class Halton(Projection):
    """Points of a randomized Halton sequence, transformed to normal vectors.

    Each vector is `N(0, I)`, and together the vectors fill the space more evenly than
    independent draws in the first few dimensions. This needs SciPy.

    Args:
        randomization: `"scramble"` permutes the digits of the first points at random
            (Owen). `"start"` takes consecutive points from a random start (Wang and
            Hickernell); its late dimensions are correlated unless `count` is much
            larger than the `dim`-th prime.
        seed: Non-negative integer. The same seed gives the same numbers.

    Raises:
        ValueError: If `randomization` is unknown.

    Reference:
        Avron et al., "Quasi-Monte Carlo Feature Maps for Shift-Invariant Kernels"
        (2016); Owen, "A randomized Halton algorithm in R" (2017); Wang and Hickernell,
        "Randomized Halton Sequences" (2000).

    Examples:
        >>> projection = keras_rfattn.papers.Halton(randomization="start", seed=0)
        >>> vectors = projection((2, 8, 32))  # heads, head dim, number of vectors
        >>> tuple(vectors.shape)
        (2, 8, 32)
    """

    def __init__(self, randomization="scramble", seed=0):
        if randomization not in RANDOMIZATIONS:
            raise ValueError(
                f"`randomization` must be one of {RANDOMIZATIONS}. Received: "
                f"randomization={randomization!r}."
            )
        super().__init__(seed=seed)
        self.randomization = randomization

    def sample(self, generator, dim, count):
        from scipy import special
        from scipy.stats import qmc

        scramble = self.randomization == "scramble"
        sequence = qmc.Halton(dim, scramble=scramble, seed=generator)
        if not scramble:
            # `fast_forward` would compute every point before it.
            sequence.num_generated = int(generator.integers(LAST_START))
        points = sequence.random(count)
        # The normal quantile of exactly 0 would be infinite.
        return special.ndtri(np.clip(points, 1e-12, 1 - 1e-12))

    def get_config(self):
        return {**super().get_config(), "randomization": self.randomization}
