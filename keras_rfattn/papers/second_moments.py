"""Second moments and variances of estimators that only papers use.

The functions complement `kernels/variance.py`, which explains second moments. Pairs
`x`, `y` have shape `(..., d)` and results shape `(...)`. "CRT" is Likhosherstov et al.,
"Chefs' Random Tables" (2022); "HRF" is Choromanski et al., "Hybrid Random Features"
(2022).
"""

import numpy as np

from keras_rfattn.kernels.variance import log_moment_of_z


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


def variance(log_moment, x, y):
    """Returns `E[Z²] - SM²`, the variance of one unbiased draw Z.

    Args:
        log_moment: `log E[Z²]`, array of shape `(...)`.
    """
    kernel = np.sum(x * y, -1)
    return np.exp(2 * kernel) * np.expm1(np.maximum(log_moment - 2 * kernel, 0))


def log_moment_generalized_exponential(x, y, a=0.0, s=1):
    """Returns the log second moment of `Re f1(w, x) f2(w, y)` (CRT, equation 6).

    Theorem 3.2 gives it for `f(w, x) = D exp(A ‖w‖² + B w · x + C ‖x‖²)` with
    `B = √(s (1 - 4A))`, `C = -(s + 1) / 2`, `D = (1 - 4A)^(d/4)` and `Re(1 - 8A) > 0`.
    The second moment for the Gaussian kernel is, with `z = ‖x + s y‖²`,

        ½ exp(-(s+1)(‖x‖²+‖y‖²)) (Re(α1 exp(α2 z)) + α3 exp(α4 z))
        α1 = √(1 + 16A²/(1-8A))^d,        α2 = s + s / (1 - 8A)
        α3 = (1 + 16|A|²/(1-8 Re A))^(d/2), α4 = s/2 + (s + 2|1-4A|)/(2(1-8 Re A))

    and that for the softmax kernel is `exp(‖x‖² + ‖y‖²)` times as large.
    `A = 0, s = -1` gives trigonometric features, `A = 0, s = 1` positive ones, and real
    `A < 0` OPRF.

    Args:
        a: The parameter A, real or complex.
        s: 1 or -1.
    """
    z = np.sum((x + s * y) ** 2, -1)
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return log_moment_of_z(z, x.shape[-1], a, s) - s * squares


def generalized_exponential(x, y, a=0.0, s=1):
    """Returns the one-draw variance of generalized exponential features.

    The arguments and the shape of the result are those of
    `log_moment_generalized_exponential`. `a=0, s=-1` gives trigonometric features.

    Args:
        a: The parameter A, real or complex, with `Re(1 - 8A) > 0`.
        s: 1 or -1.
    """
    return variance(log_moment_generalized_exponential(x, y, a, s), x, y)


def log_moment_positive_pair(x, y):
    """Returns the log second moment of a ± pair of positive features.

    The estimator is `½ Σ_± exp(±w · (x + y)) exp(-(‖x‖² + ‖y‖²)/2)`, with features of
    width 2. Its second moment is `½ (1 + exp(2 ‖x + y‖²)) exp(-‖x‖² - ‖y‖²)` (HRF,
    lemma 2.2).
    """
    z = np.sum((x + y) ** 2, -1)
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return np.logaddexp(0, 2 * z) - np.log(2) - squares


def positive_pair(x, y):
    """Returns the variance of one ± pair; see `log_moment_positive_pair`.

    It is `½ exp(‖x + y‖²) SM² (1 - exp(-‖x + y‖²))²`, which is accurate near 0 too.
    """
    z = np.sum((x + y) ** 2, -1)
    softmax = np.exp(np.sum(x * y, -1))
    return np.exp(z) * softmax**2 * (1 - np.exp(-z)) ** 2 / 2
