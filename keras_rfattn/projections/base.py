"""The base class of projections, which draw the random vectors of feature maps.

A projection is a seeded Keras initializer for a weight of shape
`(heads, head_dim, num_features)`: each head has its own set of vectors, which are the
columns. Every projection in the table satisfies these laws, which are tested:

1. Every vector is marginally `N(0, I)`, so that an estimator built on it is unbiased.
Otherwise `is_gaussian` is false, and the docstring says what the distribution is.
2. Heads are independent.
3. The numbers come from NumPy's Philox generator: the same seed gives the same float32
numbers on every backend.
"""

import keras
import numpy as np

from keras_rfattn.arguments import is_integer


class Projection(keras.initializers.Initializer):
    """Base class of random projections.

    Calling a projection with a shape `(K, H, m)` draws m vectors of dim H for each of K
    heads. They are the columns of a tensor of this shape, whose dtype is the argument
    `dtype`, float32 by default. Subclasses implement `sample`.

    Args:
        seed: Non-negative integer. The same seed gives the same numbers.

    Examples:
        >>> class Signs(keras_rfattn.projections.Projection):
        ...     is_gaussian = False
        ...     def sample(self, generator, dim, count):
        ...         return generator.choice([-1.0, 1.0], (count, dim))
        >>> tuple(Signs(seed=0)((2, 8, 32)).shape)
        (2, 8, 32)
    """

    is_gaussian = True

    def __init__(self, seed=0):
        if not is_integer(seed) or seed < 0:
            raise ValueError(
                f"`seed` must be a non-negative integer. Received: seed={seed!r:.80}."
            )
        self.seed = int(seed)

    def __call__(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(self.draw(shape), dtype=dtype)

    def draw(self, shape):
        """Returns the vectors as a float32 NumPy array, in a traced program too."""
        *heads, dim, count = shape
        generator = np.random.Generator(np.random.Philox(self.seed))
        draws = [self.sample(generator, dim, count) for _ in range(int(np.prod(heads)))]
        return np.stack(draws).swapaxes(-1, -2).reshape(shape).astype("float32")

    def sample(self, generator, dim, count):
        """Draws `count` vectors as a NumPy array of shape `(count, dim)`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `sample(generator, dim, count)`."
        )

    def get_config(self):
        return {"seed": self.seed}


@keras.saving.register_keras_serializable("keras_rfattn")
class Gaussian(Projection):
    """Independent draws from `N(0, I)`, by a `seed` as in `Projection`."""

    def sample(self, generator, dim, count):
        return generator.standard_normal((count, dim))


def gaussian_lengths(generator, count, dim):
    """Returns the lengths of independent Gaussian vectors, of shape `(count, 1)`."""
    vectors = generator.standard_normal((count, dim))
    return np.linalg.norm(vectors, axis=-1, keepdims=True)
