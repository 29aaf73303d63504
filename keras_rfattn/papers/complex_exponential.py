"""Complex exponential features, which transform queries by A and keys by `A⁻ᵀ`."""

import math

import numpy as np
from keras import ops

from keras_rfattn.arguments import check_choice
from keras_rfattn.backend import precise_einsum
from keras_rfattn.feature_maps.base import half_square, number
from keras_rfattn.feature_maps.fits import balance, mean_of, second_moments
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.weights import Adaptive
from keras_rfattn.ops.features import Features
from keras_rfattn.papers.second_moments import log_moment_complex_exponential

FORMS = ("complex", "real", "full")
# Largest magnitude of an entry of a diagonal A, and the inverse of the smallest. These
# bounds matter where the center is 0 on one side only, so that no finite and invertible
# A solves the equations.
LARGEST = 1e3


class MatrixExponential(Adaptive, ProjectedFeatureMap):
    """Base of maps that multiply queries by A and keys by `A⁻ᵀ`, with one A per head.

    A is the identity until `set_matrix` sets it. Subclasses implement
    `_features(x, matrix, conjugation)`, for the matrix of a side and for the last
    argument of `exponential`.
    """

    is_symmetric = False
    # The form of A: "complex" or "real" diagonals, or "full" real matrices.
    form = "real"

    def build(self, input_shape):
        super().build(input_shape)
        heads, dim = self.num_heads, self.head_dim
        shape = (heads, dim, dim) if self.form == "full" else (heads, 2, dim)
        start = np.eye(dim) if self.form == "full" else np.eye(2)[0][:, None]
        start = np.broadcast_to(start, shape)
        self.matrix = self.add_fixed("matrix", start)
        if self.form == "full":
            self.inverse = self.add_fixed("inverse", start)

    def set_matrix(self, a):
        """Sets A for all heads.

        Args:
            a: Diagonals of shape `(K, H)`, real or complex as `form` says. If the form
                is `"full"`, real matrices of shape `(K, H, H)`.

        Raises:
            ValueError: If A has another shape, is complex where it must be real, or
                cannot be inverted.
        """
        a = np.asarray(a)
        square = (self.head_dim,) if self.form == "full" else ()
        shape = (self.num_heads, self.head_dim, *square)
        check_invertible(a, shape, self.form)
        if self.form == "full":
            self.matrix.assign(a)
            self.inverse.assign(np.linalg.inv(a).swapaxes(-1, -2))
        else:
            self.matrix.assign(np.stack([a.real, a.imag], axis=1))

    def query_features(self, x):
        return self._features(x, self.per_head(self.matrix, x), 1)

    def key_features(self, x):
        if self.form == "full":
            return self._features(x, self.per_head(self.inverse, x), -1)
        return self._features(x, inverted(self.per_head(self.matrix, x)), -1)


class ComplexExponential(MatrixExponential):
    """Features `exp(w·Ax - (Ax)²/2) / √m` of queries; keys use `A⁻ᵀ` in place of A.

    Here `(v)² = Σ v_l²`, without conjugation. The products of query and key features
    average to the softmax kernel for every invertible A. They have no error where
    `Ax + A⁻ᵀy = 0` (equation 17). `adapt` solves this equation for the mean query and
    the mean key. Until then A is the identity, which gives `FavorPlus`. `A = iI` gives
    `Favor`.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        form: The form of A.
            `"complex"` (default): A is diagonal, and each entry is real or imaginary
            (equations 86 and 87). The estimate is exact at the means. Features are
            signed, of width `2 m`.
            `"real"`: A is a real diagonal (equation 88, with root mean squares in place
            of the means' magnitudes). Features are positive, of width m.
            `"full"`: A is a real matrix that makes the covariances of Ax and A⁻ᵀy
            equal. Features are positive, of width m.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `form` or
            `projection` is unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), sections 2.3 and H.2.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.ComplexExponential(32, form="real", seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> feature_map.is_calibrated, feature_map.output_dim
        (True, 32)
    """

    def __init__(self, num_features=None, form="complex", **kwargs):
        super().__init__(num_features, **kwargs)
        check_choice("form", form, FORMS)
        self.form = form

    @property
    def is_positive(self):
        return self.form != "complex"

    @property
    def output_dim(self):
        return (1 if self.is_positive else 2) * self.num_features

    def fit(self, samples):
        if self.form == "full":
            self.set_matrix(balance(*second_moments(samples)))
        elif self.form == "real":
            squares = np.einsum("skhh->skh", second_moments(samples))
            self.set_matrix(diagonal(*np.sqrt(squares), is_real=True))
        else:
            centers = mean_of(lambda q, k: np.stack([q.mean(1), k.mean(1)]), samples)
            self.set_matrix(diagonal(*centers, is_real=False))

    def log_moment(self, head=0):
        a = number(self.matrix, head)
        a = a if self.form == "full" else a[0] + 1j * a[1]
        return lambda x, y: log_moment_complex_exponential(x, y, a)

    def _features(self, x, matrix, conjugation):
        if self.form == "full":
            real = precise_einsum("...nh,nih->...ni", x, matrix)
            return exponential(self.project(real) - half_square(real))
        return diagonal_features(self, *diagonal_parts(x, matrix), conjugation)

    def get_config(self):
        return {**super().get_config(), "form": self.form}


def check_invertible(a, shape, form):
    """Raises `ValueError` unless A is invertible, and real if `form` demands it."""
    if a.shape != shape or (form != "complex" and np.any(np.imag(a) != 0)):
        kind = "complex" if form == "complex" else "real"
        raise ValueError(
            f"A must be {kind} and of shape {shape} for form={form!r}. Received: shape "
            f"{a.shape}, dtype {a.dtype}."
        )
    condition = np.inf
    if np.all(np.isfinite(a)):
        matrices = a if form == "full" else a[..., None] * np.eye(a.shape[-1])
        condition = np.max(np.linalg.cond(matrices))
    # With a larger condition number, A or its inverse has no correct digit in float32.
    if not condition < 1e7:
        raise ValueError(
            f"A must be invertible. Received: condition number {condition:.3g}."
        )


def exponential(exponent, phase=None, conjugation=1):
    """Returns real features for the complex `exp(exponent + i phase) / √m`.

    The products of real query and key features equal the real part of the products of
    the complex ones, if `conjugation` is 1 for queries and -1 for keys. It multiplies
    the imaginary part.

    Both arrays have shape `(..., m)`; a phase of `None` is 0. Features have width m, or
    `2 m` if there is a phase.
    """
    exponent = exponent - math.log(exponent.shape[-1]) / 2
    if phase is None:
        return Features(None, exponent)
    values = ops.concatenate([ops.cos(phase), conjugation * ops.sin(phase)], axis=-1)
    return Features(values, ops.concatenate([exponent, exponent], axis=-1))


def inverted(a):
    """Returns the inverse of a diagonal `(..., 2, H)` of real and imaginary parts."""
    real, imaginary = a[..., 0, :], a[..., 1, :]
    square = ops.square(real) + ops.square(imaginary)
    return ops.stack([real / square, -imaginary / square], axis=-2)


def diagonal_parts(x, a):
    """Returns the real and imaginary parts of `A x` for a diagonal `(..., 2, H)`."""
    return x * a[..., 0, :], x * a[..., 1, :]


def diagonal_features(feature_map, real, imaginary, conjugation):
    """Returns the features of a map for the parts of `A x`, which `project` takes."""
    exponent = feature_map.project(real) - half_square(real) + half_square(imaginary)
    phase = None
    if not feature_map.is_positive:
        phase = feature_map.project(imaginary)
        phase = phase - ops.sum(real * imaginary, axis=-1, keepdims=True)
    return exponential(exponent, phase, conjugation)


def diagonal(query_center, key_center, is_real):
    """Returns the complex diagonal of A, `(..., d)`, for centers x and y, `(..., d)`.

    Each entry is real or imaginary ("Hybrid Random Features", equations 86 to 88). A
    solves `A x + A⁻¹ y = 0` unless `is_real`.
    """
    x, y = np.abs(query_center), np.abs(key_center)
    both_zero = (x == 0) & (y == 0)
    size = np.sqrt(
        np.where(both_zero, 1, y) / np.where(both_zero, 1, np.maximum(x, 1e-30))
    )
    size = np.clip(size, 1 / LARGEST, LARGEST)
    if is_real:
        return size.astype(complex)
    same_sign = query_center * key_center > 0
    return np.where(same_sign, 1j * size, size)
