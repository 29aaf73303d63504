"""Closed-form variance of estimators of the softmax kernel, against which tests check.

The functions take pairs `x`, `y`, arrays of shape `(..., d)`, and return an array of
shape `(...)`. The variance of a mean over m independent vectors is the returned value
divided by m. `orthogonal_covariance` gives the change for orthogonal vectors.

The functions `log_moment_*` return the logarithm of the second moment `E[Z²]` of one
draw Z, which is finite where the moment itself would overflow. `log_variance` subtracts
the square of the mean. `papers/second_moments.py` has the moments of estimators that
only papers use.

"CRT" is Likhosherstov et al., "Chefs' Random Tables" (2022).
"""

import numpy as np


def log_variance(log_moment, x, y):
    """Returns the log variance `log(E[Z²] - SM²)` of a draw Z; -inf where it is 0."""
    excess = np.maximum(log_moment - 2 * np.sum(x * y, -1), 0)
    with np.errstate(divide="ignore"):
        return log_moment + np.log(-np.expm1(-excess))


def log_moment_of_z(z, dim, a, s=1):
    """Returns `log E[Z²] + s (‖x‖² + ‖y‖²)` of generalized exponential features.

    CRT minimizes this to choose A, real or complex with `Re(1 - 8A) > 0`: it depends on
    the data, of dimension `dim`, only by `z = ‖x + s y‖²`.
    """
    a = np.asarray(a, dtype=complex)
    real = 1 - 8 * a.real
    log_a1 = dim / 2 * np.log(1 + 16 * a**2 / (1 - 8 * a))
    a2 = s + s / (1 - 8 * a)
    log_a3 = dim / 2 * np.log(1 + 16 * np.abs(a) ** 2 / real)
    a4 = s / 2 + (s + 2 * np.abs(1 - 4 * a)) / (2 * real)
    first, second = log_a1 + a2 * z, log_a3 + a4 * z
    # |exp(first)| <= exp(second), so that nothing overflows.
    return second + np.log((1 + np.exp(first - second).real) / 2)


def log_moment_per_direction(x, y, a):
    """Returns the log second moment of OPRF features with a real A per coordinate."""
    # It is a product over coordinates of one-dimensional moments.
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return np.sum(log_moment_of_z((x + y) ** 2, 1, a), -1) - squares


def orthogonal_covariance(x, y, s=1):
    """Returns the relative covariance `E[Z Z'] / SM² - 1` of orthogonal draws.

    The two draws Z and Z' use vectors w and w' with orthogonal directions and Gaussian
    lengths. The formula holds for generalized exponential features with any A, real or
    complex, and for ± pairs of positive features. The integral over directions is
    `₀F₁(d/2; s(r² + r'²)z/4)` with `z = ‖x + s y‖²`, and the integral over lengths
    leaves

        exp(-v) ₁F₁(-d/2; d/2; -v) - 1,   v = s z / 2,

    in which A has cancelled. It is negative for s = 1; theorem 4.1 of CRT bounds it for
    OPRF. A mean over m vectors in orthogonal blocks has more variance than one over
    independent vectors, by this covariance times the mean number of other vectors in a
    vector's block, divided by m. d must be at least 2, and s is 1, or -1 for
    trigonometric features.
    """
    from scipy import special

    half = x.shape[-1] / 2
    v = s * np.sum((x + s * y) ** 2, -1) / 2
    return np.exp(-v) * special.hyp1f1(-half, half, -v) - 1
