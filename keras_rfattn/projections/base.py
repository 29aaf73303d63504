"""Projections, which draw the random vectors of feature maps.

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
