"""Closed-form variance of hybrid estimators, and their errors on a sphere.

Pairs `x`, `y` have shape `(..., d)` and results shape `(...)`, as in
`kernels/variance.py`. "HRF" is Choromanski et al., "Hybrid Random Features" (2022).
"""

import numpy as np

from keras_rfattn.papers import second_moments


def angle(x, y):
    """Returns the angle between x and y, in radians, from 0 to π.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> round(float(hybrid_variance.angle(x, y)), 4)
        1.5708
    """
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.arccos(np.clip(np.sum(x * y, -1) / lengths, -1, 1))


def angular_moments(x, y, n):
    """Returns `E λ̂²`, `E (1 - λ̂)²`, `E λ̂ (1 - λ̂)` of HRF's angular coefficient.

    The coefficient is `λ̂ = ½ - (1/2n) Σ sgn(τ·x) sgn(τ·y)`, with mean `θ / π` (lemma
    3.2 and theorem D.1). Equation 47 as printed has another second moment.

    Args:
        n: Number of random vectors τ.

    Returns:
        Tuple of the three moments, each an array of shape `(...)`.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> [round(float(m), 4) for m in hybrid_variance.angular_moments(x, y, n=4)]
        [0.3125, 0.3125, 0.1875]
    """
    t = angle(x, y) / np.pi
    return (
        t * (t - t / n + 1 / n),
        (1 - t) * (1 - t + t / n),
        t * (1 - 1 / n - t + t / n),
    )


def gaussian_moments(x, y, n, sigma, rho):
    """Returns `E λ̂²`, `E (1 - λ̂)²`, `E λ̂ (1 - λ̂)` of the Gaussian coefficient.

    The normalized coefficient is `λ̂ = (1 - (1/n) Σ cos(σ τ · (x - y))) / ρ` (HRF,
    theorem F.1, equations 72 and 73; F.2 is the same on a sphere).

    Args:
        n: Number of random vectors τ.
        sigma: Positive number σ, the smoothness.
        rho: Positive number ρ, the normalizing constant.

    Returns:
        Tuple of the three moments, each an array of shape `(...)`.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> moments = hybrid_variance.gaussian_moments(x, y, n=4, sigma=1.0, rho=1.0)
        >>> [round(float(m), 4) for m in moments]
        [0.493, 0.2288, 0.1391]
    """
    square = np.sum((x - y) ** 2, -1) * sigma**2
    mean, spread = np.exp(-square / 2), (1 - np.exp(-square)) ** 2 / (2 * n)
    second = ((1 - mean) ** 2 + spread) / rho**2
    rest = ((1 - rho - mean) ** 2 + spread) / rho**2
    return second, rest, (1 - mean) / rho - second


def bipolar_hybrid(x, y, m, moments, shared=False):
    """Returns the variance of `λ̂ SM++ + (1 - λ̂) SMtrig` (HRF, theorem 3.1).

    See also theorems D.1, F.1 and F.2.

    Args:
        m: Number of vectors of each base estimator.
        moments: Moments of the coefficient, as returned by `angular_moments`.
        shared: Whether the base estimators use the same vectors.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> moments = hybrid_variance.angular_moments(x, y, n=4)
        >>> round(float(hybrid_variance.bipolar_hybrid(x, y, m=16, moments=moments)), 4)
        0.1079
    """
    of_positive, of_trigonometric, of_both = moments
    result = of_positive * second_moments.positive_pair(x, y) / m
    result = (
        result
        + of_trigonometric * second_moments.generalized_exponential(x, y, 0, -1) / m
    )
    if shared:
        norms = np.sum(x * x, -1) - np.sum(y * y, -1)
        kernel = np.exp(2 * np.sum(x * y, -1))
        result = result - 2 / m * kernel * (1 - np.cos(norms)) * of_both
    return result


def max_relative_error(radius, m):
    """Returns the largest `√MSE / SM` on a sphere (HRF, lemma 3.4).

    It is the same for SM++ and SMtrig.

    Args:
        radius: Radius of the sphere.
        m: Number of vectors of SMtrig, or of pairs of vectors of SM++.

    Returns:
        A number.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> round(float(hybrid_variance.max_relative_error(radius=1.0, m=16)), 4)
        1.2823
    """
    return np.sqrt(1 / (2 * m)) * np.exp(2 * radius**2) * -np.expm1(-4 * radius**2)


def relative_error(theta, radius, m, positive):
    """Returns `√MSE / SM` at angle θ on a sphere (HRF, lemma 3.4).

    Args:
        theta: Angle between the inputs, in radians.
        radius: Radius of the sphere.
        m: Number of vectors of SMtrig, or of pairs of vectors of SM++.
        positive: Whether the estimator is SM++ and not SMtrig.

    Returns:
        A number, or an array in the shape of `theta`.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> error = hybrid_variance.relative_error(1.0, radius=1.0, m=16, positive=True)
        >>> round(float(error), 4)
        0.787
    """
    theta = np.pi - theta if positive else theta
    square = 2 * radius**2 * np.sin(theta / 2) ** 2
    return np.sqrt(1 / (2 * m)) * np.exp(square) * -np.expm1(-2 * square)


def angular_relative_error_bound(radius, m, n):
    """Returns a bound on the angular hybrid's largest error (HRF, theorem 3.5).

    The error is `√MSE / SM` on a sphere, as in `max_relative_error`.

    Args:
        radius: Radius of the sphere, at least 1.
        m: Number of vectors of both base estimators.
        n: Number of vectors of the coefficient.

    Returns:
        A number.

    Examples:
        >>> from keras_rfattn.papers import hybrid_variance
        >>> bound = hybrid_variance.angular_relative_error_bound(radius=1.0, m=16, n=4)
        >>> round(float(bound), 4)
        0.7902
    """
    factor = np.sqrt(1 / np.pi - 1 / (n * np.pi) + 1 / (n * np.sqrt(np.pi)))
    return max_relative_error(radius, m) * factor / radius
