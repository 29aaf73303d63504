"""Random counts, for features that are monomials of their input."""

import keras
import numpy as np

from keras_rfattn.projections.base import Projection

LARGEST_COUNT = 2**24


class Counts(Projection):
    """Base class of projections whose entries are independent counts 0, 1, 2, …

    Counts are not Gaussian and not in the table of projections: their parameter belongs
    to the feature map, whose constants depend on it.

    Args:
        parameter: Parameter of the distribution: a number, or one number per head.
        seed: Non-negative integer. The same seed gives the same counts.

    Raises:
        ValueError: If `seed` is not a non-negative integer. In a call: if float32 could
            not hold counts of this `parameter` exactly.

    Examples:
        >>> class Coins(keras_rfattn.papers.Counts):
        ...     def mean(self, parameter):
        ...         return parameter
        ...     def draw(self, generator, parameter, size):
        ...         return generator.binomial(1, parameter, size)
        >>> tuple(Coins(0.5, seed=0)((2, 8, 32)).shape)
        (2, 8, 32)
    """

    is_gaussian = False

    def __init__(self, parameter, seed=0):
        super().__init__(seed=seed)
        self.parameter = parameter

    def __call__(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(self.counts(shape), dtype=dtype)

    def counts(self, shape):
        """Returns the counts of a call as a NumPy array."""
        heads, dim, count = shape
        largest = float(np.max(self.mean(np.asarray(self.parameter, "float64"))))
        # Above `LARGEST_COUNT` float32 cannot hold odd numbers; draws may be 30 times
        # their mean.
        if not largest < LARGEST_COUNT / 32:
            raise ValueError(
                f"Counts would be too large for float32: parameter={self.parameter} "
                f"has a mean of {largest:.3g}. Scale the inputs down, or pass a "
                "`parameter` of smaller counts."
            )
        generator = np.random.Generator(np.random.Philox(self.seed))
        counts = [
            self.draw(generator, parameter, (dim, count))
            for parameter in np.broadcast_to(self.parameter, (heads,))
        ]
        return np.stack(counts).astype("float32")

    def get_config(self):
        parameter = np.asarray(self.parameter).tolist()
        return {**super().get_config(), "parameter": parameter}


@keras.saving.register_keras_serializable("keras_rfattn")
class PoissonCounts(Counts):
    """Counts k with probability `exp(-λ) λᵏ / k!`; the parameter is λ > 0."""

    def mean(self, parameter):
        return parameter

    def draw(self, generator, parameter, size):
        return generator.poisson(parameter, size)


@keras.saving.register_keras_serializable("keras_rfattn")
class GeometricCounts(Counts):
    """Counts k with probability `p (1 - p)ᵏ`; the parameter is p in (0, 1)."""

    def mean(self, parameter):
        return (1 - parameter) / parameter

    def draw(self, generator, parameter, size):
        return generator.geometric(parameter, size) - 1
