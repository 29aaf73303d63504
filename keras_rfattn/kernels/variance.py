"""Closed-form variance of estimators of the softmax kernel: the oracle of tests.

All are for pairs `x`, `y` of shape `(..., d)` and independent vectors; the variance
of a mean over m of them is the value over m. What orthogonal vectors change is in
`orthogonal_covariance`.

The functions `log_moment_*` give the logarithm of the second moment `E[Z²]` of one
draw Z, finite where the moment itself would overflow. `variance` and `log_variance`
take the square of the mean off. The Gaussian kernel's estimators are the same
times `exp(-(‖x‖² + ‖y‖²) / 2)`.

Sources: "CRT" is Likhosherstov et al., "Chefs' Random Tables" (2022); "HRF" is
Choromanski et al., "Hybrid Random Features" (2022).
"""

import numpy as np


def variance(log_moment, x, y):
    """`E[Z²] - SM²`, the variance of one unbiased draw Z.

    Args:
        log_moment: `log E[Z²]`, array of shape `(...)`.
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.

    Returns:
        Array of shape `(...)`.
    """
    kernel = np.sum(x * y, -1)
    return np.exp(2 * kernel) * np.expm1(np.maximum(log_moment - 2 * kernel, 0))


def log_variance(log_moment, x, y):
    """The logarithm of `variance`, without overflow; -inf where it is 0.

    Args:
        log_moment: `log E[Z²]`, array of shape `(...)`.
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.

    Returns:
        Array of shape `(...)`.
    """
    excess = np.maximum(log_moment - 2 * np.sum(x * y, -1), 0)
    with np.errstate(divide="ignore"):
        return log_moment + np.log(-np.expm1(-excess))


def log_moment_of_z(z, dim, a, s=1):
    """`log E[Z²] + s (‖x‖² + ‖y‖²)` of generalized exponential features.

    What CRT minimises to choose A: of the data it needs `z = ‖x + s y‖²` alone.

    Args:
        z: Array of shape `(...)`.
        dim: The dimension d.
        a: A, real or complex, with `Re(1 - 8A) > 0`.
        s: 1 or -1.

    Returns:
        Array of shape `(...)`.
    """
    a = np.asarray(a, dtype=complex)
    real = 1 - 8 * a.real
    log_a1 = dim / 2 * np.log(1 + 16 * a**2 / (1 - 8 * a))
    a2 = s + s / (1 - 8 * a)
    log_a3 = dim / 2 * np.log(1 + 16 * np.abs(a) ** 2 / real)
    a4 = s / 2 + (s + 2 * np.abs(1 - 4 * a)) / (2 * real)
    first, second = log_a1 + a2 * z, log_a3 + a4 * z
    # |exp(first)| <= exp(second).
    return second + np.log((1 + np.exp(first - second).real) / 2)


def log_moment_generalized_exponential(x, y, a=0.0, s=1):
    """Second moment of `Re f1(w, x) f2(w, y)` (CRT, theorem 3.2, equation 6).

    For `f(w, x) = D exp(A ‖w‖² + B w · x + C ‖x‖²)` with `B = √(s (1 - 4A))`,
    `C = -(s + 1) / 2`, `D = (1 - 4A)^(d/4)` and `Re(1 - 8A) > 0`, the Gaussian
    kernel's is, with `z = ‖x + s y‖²`,

        ½ exp(-(s+1)(‖x‖²+‖y‖²)) (Re(α1 exp(α2 z)) + α3 exp(α4 z))
        α1 = √(1 + 16A²/(1-8A))^d,        α2 = s + s / (1 - 8A)
        α3 = (1 + 16|A|²/(1-8 Re A))^(d/2), α4 = s/2 + (s + 2|1-4A|)/(2(1-8 Re A))

    and the softmax kernel's is `exp(‖x‖² + ‖y‖²)` times that. `A = 0, s = -1` are
    trigonometric features, `A = 0, s = 1` positive ones, real `A < 0` OPRF.

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.
        a: The parameter A, real or complex.
        s: 1 or -1.

    Returns:
        Array of shape `(...)`.
    """
    z = np.sum((x + s * y) ** 2, -1)
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return log_moment_of_z(z, x.shape[-1], a, s) - s * squares


def generalized_exponential(x, y, a=0.0, s=1):
    """One-draw variance of the estimator of `log_moment_generalized_exponential`.

    Takes and returns what that does; trigonometric features are `a=0, s=-1`.
    """
    return variance(log_moment_generalized_exponential(x, y, a, s), x, y)


def log_moment_per_direction(x, y, a):
    """Second moment of OPRF features with a real A for each coordinate.

    A product over coordinates, each as in one dimension.

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.
        a: Array of shape `(d,)`, below 1/8.

    Returns:
        Array of shape `(...)`.
    """
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return np.sum(log_moment_of_z((x + y) ** 2, 1, a), -1) - squares


def orthogonal_covariance(x, y, s=1):
    """Relative covariance `E[Z Z'] / SM² - 1` of two draws on orthogonal vectors.

    Of generalized exponential features with any A, real or complex, and of ± pairs of
    positive ones: w and w' have Gaussian lengths, their directions are orthogonal. The
    integral over directions is `₀F₁(d/2; s(r² + r'²)z/4)` with `z = ‖x + s y‖²`, and
    that over lengths leaves

        exp(-v) ₁F₁(-d/2; d/2; -v) - 1,   v = s z / 2,

    in which A has cancelled. Negative for s = 1: theorem 4.1 of CRT bounds it for
    OPRF. A mean over m vectors in orthogonal blocks has this times the mean number of
    other vectors in a vector's block, over m, more variance than independent ones.

    Args:
        x: Array of shape `(..., d)`, d at least 2.
        y: Array of shape `(..., d)`.
        s: 1 or -1, which is trigonometric features'.

    Returns:
        Array of shape `(...)`.
    """
    from scipy import special

    half = x.shape[-1] / 2
    v = s * np.sum((x + s * y) ** 2, -1) / 2
    return np.exp(-v) * special.hyp1f1(-half, half, -v) - 1


def log_moment_positive_pair(x, y):
    """Second moment of `½ Σ_± exp(±w · (x + y)) exp(-(‖x‖² + ‖y‖²)/2)`.

    HRF, lemma 2.2: `½ (1 + exp(2 ‖x + y‖²)) exp(-‖x‖² - ‖y‖²)`, of features of width 2.

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.

    Returns:
        Array of shape `(...)`.
    """
    z = np.sum((x + y) ** 2, -1)
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    return np.logaddexp(0, 2 * z) - np.log(2) - squares


def positive_pair(x, y):
    """One-pair variance of the estimator of `log_moment_positive_pair`.

    `½ exp(‖x + y‖²) SM² (1 - exp(-‖x + y‖²))²`, exact near 0 too.
    """
    z = np.sum((x + y) ** 2, -1)
    softmax = np.exp(np.sum(x * y, -1))
    return np.exp(z) * softmax**2 * (1 - np.exp(-z)) ** 2 / 2


def log_moment_poisson(products, rate):
    """Second moment of Poisson features (CRT, theorem 3.4, equation 11).

    `exp(λd + Σ_l x_l² y_l² / λ)` for the softmax kernel.

    Args:
        products: `x_l y_l`, array of shape `(..., d)`.
        rate: λ > 0.
    """
    return rate * products.shape[-1] + np.sum(products**2, -1) / rate


def log_moment_geometric(products, p):
    """Second moment of geometric features (CRT, theorem 3.5, equation 13).

    `p^-d Π_l I0(2 |x_l y_l| / √(1 - p))` for the softmax kernel.

    Args:
        products: `x_l y_l`, array of shape `(..., d)`.
        p: Success probability, in (0, 1).
    """
    from scipy import special

    z = 2 * np.abs(products) / np.sqrt(1 - p)
    bessel = np.sum(np.log(special.i0e(z)) + z, -1)
    return bessel - products.shape[-1] * np.log(p)


def log_moment_shifted(log_moment, x, y, shift):
    """Second moment of a softmax estimator used on `x - c`, `y - c`.

    `x · y = (x-c)·(y-c) + c·x + c·y - ‖c‖²`: the factor is put back (CRT, 3.2.3).

    Args:
        log_moment: Of the pair `x - c`, `y - c`.
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.
        shift: c, of shape `(d,)`.
    """
    return log_moment + 2 * ((x + y) @ shift - shift @ shift)


def log_moment_complex_exponential(x, y, a):
    """Second moment of `Re exp(w · z) exp(-(Ax)²/2 - (A⁻ᵀy)²/2)`, z = Ax + A⁻ᵀy.

    From HRF's lemma 2.4, `E exp(w · v) = exp(v · v / 2)` without conjugation, and
    `(Re Z)² = (|Z|² + Re Z²) / 2`. It is the mean's square where Re z and Im z
    vanish (equation 18).

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.
        a: Complex or real matrix A, `(d, d)`, or its diagonal, `(d,)`.
    """
    a = np.asarray(a)
    u = x * a if a.ndim == 1 else x @ a.T
    v = y / a if a.ndim == 1 else y @ np.linalg.inv(a)
    z = u + v
    constant = -np.sum(u * u, -1) - np.sum(v * v, -1)
    first = 2 * np.sum(np.real(z) ** 2, -1) + np.real(constant)
    second = 2 * np.sum(z * z, -1) + constant
    return first + np.log((1 + np.exp(second - first).real) / 2)
