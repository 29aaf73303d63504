"""Closed-form variance of estimators of the softmax kernel: the oracle of tests.

All are for one pair `x`, `y` of shape `(..., d)` and independent vectors
`w ~ N(0, I_d)`; the variance of a mean over m of them is the value over m.
Orthogonal vectors do no worse (theorem 4.1 of "Chefs' Random Tables" for OPRF).
"""

import numpy as np


def generalized_exponential(x, y, a=0.0, s=1):
    """One-draw variance of `Re f1(w, x) f2(w, y)` as an estimate of `exp(x · y)`.

    Theorem (Likhosherstov et al., "Chefs' Random Tables", 2022, equation 6): for
    `f(w, x) = D exp(A ‖w‖² + B w · x + C ‖x‖²)` with `B = √(s (1 - 4A))`,
    `C = -(s + 1) / 2`, `D = (1 - 4A)^(d/4)` and `Re(1 - 8A) > 0`, the variance for
    the Gaussian kernel K is, with `z = ‖x + s y‖²`,

        ½ exp(-(s+1)(‖x‖²+‖y‖²)) (Re(α1 exp(α2 z)) + α3 exp(α4 z)) - K²
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
    d = x.shape[-1]
    a = np.asarray(a, dtype=complex)
    xx, yy = np.sum(x * x, -1), np.sum(y * y, -1)
    z = np.sum((x + s * y) ** 2, -1)
    real = 1 - 8 * a.real
    log_a1 = d / 2 * np.log(1 + 16 * a**2 / (1 - 8 * a))
    a2 = s + s / (1 - 8 * a)
    log_a3 = d / 2 * np.log(1 + 16 * np.abs(a) ** 2 / real)
    a4 = s / 2 + (s + 2 * np.abs(1 - 4 * a)) / (2 * real)
    base = -s * (xx + yy)
    first = np.exp(log_a1 + a2 * z + base).real
    second = np.exp(log_a3 + a4 * z + base)
    return (first + second) / 2 - np.exp(2 * np.sum(x * y, -1))


def positive_pair(x, y):
    """One-pair variance of `½ Σ_± exp(±w · (x + y)) exp(-(‖x‖² + ‖y‖²)/2)`.

    Lemma 2.2 of Choromanski et al., "Hybrid Random Features" (2022):
    `½ exp(‖x + y‖²) SM² (1 - exp(-‖x + y‖²))²`, of features of width 2.
    """
    z = np.sum((x + y) ** 2, -1)
    softmax = np.exp(np.sum(x * y, -1))
    return np.exp(z) * softmax**2 * (1 - np.exp(-z)) ** 2 / 2
