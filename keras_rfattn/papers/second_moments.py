"""Log second moments of estimators that only the papers' tables use.

The functions complement `kernels/variance.py`, which explains second moments and names
the sources. Pairs `x`, `y` have shape `(..., d)` and results shape `(...)`.
"""

import numpy as np


def log_moment_poisson(products, rate):
    """Returns the log second moment of Poisson features (CRT, theorem 3.4).

    The moment for the softmax kernel is `exp(λd + Σ_l x_l² y_l² / λ)` (equation 11).

    Args:
        products: `x_l y_l`, array of shape `(..., d)`.
        rate: The parameter λ > 0.

    Examples:
        >>> from keras_rfattn.papers import second_moments
        >>> x = np.array([1.0, 0.0])
        >>> round(float(second_moments.log_moment_poisson(x * x, rate=0.5)), 4)
        3.0
    """
    return rate * products.shape[-1] + np.sum(products**2, -1) / rate


def log_moment_geometric(products, p):
    """Returns the log second moment of geometric features (CRT, theorem 3.5).

    The moment for the softmax kernel is `p^-d Π_l I0(2 |x_l y_l| / √(1 - p))` (equation
    13).

    Args:
        products: `x_l y_l`, array of shape `(..., d)`.
        p: Success probability, in (0, 1).

    Examples:
        >>> from keras_rfattn.papers import second_moments
        >>> x = np.array([1.0, 0.0])
        >>> round(float(second_moments.log_moment_geometric(x * x, p=0.5)), 4)
        2.8338
    """
    from scipy import special

    z = 2 * np.abs(products) / np.sqrt(1 - p)
    bessel = np.sum(np.log(special.i0e(z)) + z, -1)
    return bessel - products.shape[-1] * np.log(p)


def log_moment_shifted(log_moment, x, y, shift):
    """Returns the log second moment of an estimator used on `x - c`, `y - c`.

    Since `x · y = (x-c)·(y-c) + c·x + c·y - ‖c‖²`, the estimator of the softmax kernel
    is multiplied by the remaining factor (CRT, 3.2.3).

    Args:
        log_moment: Log second moment for the pair `x - c`, `y - c`.
        shift: The vector c, of shape `(d,)`.

    Examples:
        >>> from keras_rfattn.papers import second_moments
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> shift = np.array([-1.0, -1.0])
        >>> products = (x - shift) * (y - shift)
        >>> moment = second_moments.log_moment_poisson(products, rate=1.0)
        >>> round(float(second_moments.log_moment_shifted(moment, x, y, shift)), 4)
        2.0
    """
    return log_moment + 2 * ((x + y) @ shift - shift @ shift)


def log_moment_complex_exponential(x, y, a):
    """Returns the log second moment of complex exponential features.

    The estimator is `Re exp(w · z) exp(-(Ax)²/2 - (A⁻ᵀy)²/2)` with `z = Ax + A⁻ᵀy`. The
    formula follows from `E exp(w · v) = exp(v · v / 2)` without conjugation (HRF, lemma
    2.4) and `(Re Z)² = (|Z|² + Re Z²) / 2`. It equals the square of the mean where Re z
    and Im z vanish (equation 18).

    Args:
        a: Complex or real matrix A of shape `(d, d)`, or its diagonal of shape `(d,)`.

    Examples:
        >>> from keras_rfattn.papers import second_moments
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> a = np.ones(2)
        >>> log_moment = second_moments.log_moment_complex_exponential(x, y, a)
        >>> round(float(log_moment), 4)
        2.0
    """
    a = np.asarray(a)
    u = x * a if a.ndim == 1 else x @ a.T
    v = y / a if a.ndim == 1 else y @ np.linalg.inv(a)
    z = u + v
    constant = -np.sum(u * u, -1) - np.sum(v * v, -1)
    first = 2 * np.sum(np.real(z) ** 2, -1) + np.real(constant)
    second = 2 * np.sum(z * z, -1) + constant
    return first + np.log((1 + np.exp(second - first).real) / 2)
