"""Quasi-Monte-Carlo: normal quantiles of a randomized Halton sequence."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection

RANDOMIZATIONS = ("scramble", "start")
# Far more points than any first digits of the dimensions have combinations.
LAST_START = 2**48


@keras.saving.register_keras_serializable("keras_rfattn")
class Halton(Projection):
    """Points of a randomized Halton sequence, made normal.

    Each vector is `N(0, I)`, and together they fill the space more evenly than
    independent draws in the first few dimensions. Needs SciPy.

    Args:
        randomization: `"scramble"` permutes the digits of the first points at random
            (Owen). `"start"` takes points from a random place on (Wang and
            Hickernell), whose late dimensions are correlated unless `count` is much
            larger than the `dim`-th prime.
        seed: Non-negative integer.

    Raises:
        ValueError: If `randomization` is none of these.

    Reference:
        Avron et al., "Quasi-Monte Carlo Feature Maps for Shift-Invariant Kernels"
        (2016); Owen, "A randomized Halton algorithm in R" (2017); Wang and
        Hickernell, "Randomized Halton Sequences" (2000).
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
            # `fast_forward` would make every point before it.
            sequence.num_generated = int(generator.integers(LAST_START))
        points = sequence.random(count)
        # A point of exactly 0 would be infinite.
        return special.ndtri(np.clip(points, 1e-12, 1 - 1e-12))

    def get_config(self):
        return {**super().get_config(), "randomization": self.randomization}
