"""Closed-form variance of hybrid estimators, and their errors on a sphere.

As in `kernels/variance.py`; "HRF" is Choromanski et al., "Hybrid Random Features"
(2022).
"""

import numpy as np

from keras_rfattn.kernels import variance


def angle(x, y):
    """The angle between x and y, in radians, from 0 to π.

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.

    Returns:
        Array of shape `(...)`.
    """
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.arccos(np.clip(np.sum(x * y, -1) / lengths, -1, 1))


def angular_moments(x, y, n):
    """`E λ̂²`, `E (1 - λ̂)²`, `E λ̂ (1 - λ̂)` of HRF's angular coefficient.

    Lemma 3.2 and theorem D.1, for `λ̂ = ½ - (1/2n) Σ sgn(τ·x) sgn(τ·y)`, whose mean
    is `θ / π`. (The print of equation 47 has another second moment.)
    """
    t = angle(x, y) / np.pi
    return (
        t * (t - t / n + 1 / n),
        (1 - t) * (1 - t + t / n),
        t * (1 - 1 / n - t + t / n),
    )


def gaussian_moments(x, y, n, sigma, rho):
    """`E λ̂²`, `E (1 - λ̂)²`, `E λ̂ (1 - λ̂)` of the normalized Gaussian coefficient.

    HRF, theorem F.1, equations 72 and 73 (F.2 is the same on a sphere), for
    `λ̂ = (1 - (1/n) Σ cos(σ τ · (x - y))) / ρ`.
    """
    square = np.sum((x - y) ** 2, -1) * sigma**2
    mean, spread = np.exp(-square / 2), (1 - np.exp(-square)) ** 2 / (2 * n)
    second = ((1 - mean) ** 2 + spread) / rho**2
    rest = ((1 - rho - mean) ** 2 + spread) / rho**2
    return second, rest, (1 - mean) / rho - second


def bipolar_hybrid(x, y, m, moments, shared=False):
    """Variance of `λ̂ SM++ + (1 - λ̂) SMtrig` (HRF, theorem 3.1; D.1, F.1, F.2).

    Args:
        x: Array of shape `(..., d)`.
        y: Array of shape `(..., d)`.
        m: Number of vectors of each base estimator.
        moments: Of the coefficient, as `angular_moments` gives them.
        shared: Whether the base estimators use the same vectors.

    Returns:
        Array of shape `(...)`.
    """
    of_positive, of_trigonometric, of_both = moments
    result = of_positive * variance.positive_pair(x, y) / m
    result = (
        result + of_trigonometric * variance.generalized_exponential(x, y, 0, -1) / m
    )
    if shared:
        norms = np.sum(x * x, -1) - np.sum(y * y, -1)
        kernel = np.exp(2 * np.sum(x * y, -1))
        result = result - 2 / m * kernel * (1 - np.cos(norms)) * of_both
    return result


def max_relative_error(radius, m):
    """The largest `√MSE / SM` on a sphere (HRF, lemma 3.4), of ++ and trig alike.

    Args:
        radius: Of the sphere.
        m: Number of vectors (of ++, of pairs).
    """
    return np.sqrt(1 / (2 * m)) * np.exp(2 * radius**2) * -np.expm1(-4 * radius**2)


def relative_error(theta, radius, m, positive):
    """`√MSE / SM` at angle θ on a sphere (HRF, lemma 3.4) of SM++ or SMtrig.

    Args:
        theta: Angle between the inputs, in radians.
        radius: Of the sphere.
        m: Number of vectors (of ++, of pairs).
        positive: Whether of SM++.
    """
    theta = np.pi - theta if positive else theta
    square = 2 * radius**2 * np.sin(theta / 2) ** 2
    return np.sqrt(1 / (2 * m)) * np.exp(square) * -np.expm1(-2 * square)


def angular_relative_error_bound(radius, m, n):
    """Bound on the angular hybrid's `max_relative_error` (HRF, theorem 3.5).

    Args:
        radius: Of the sphere, at least 1.
        m: Number of vectors of both base estimators.
        n: Number of vectors of the coefficient.
    """
    factor = np.sqrt(1 / np.pi - 1 / (n * np.pi) + 1 / (n * np.sqrt(np.pi)))
    return max_relative_error(radius, m) * factor / radius
