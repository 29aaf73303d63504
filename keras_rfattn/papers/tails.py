"""Bounds on the probability of a large error of optimal positive features.

One draw of generalized exponential features with A < 0 lies between 0 and a bound that
does not depend on the draw, so Hoeffding's inequality holds for a mean of m draws.
Pairs `x`, `y` have shape `(..., d)`.

Source: Likhosherstov et al., "Chefs' Random Tables" (2022), theorems 4.2 and 4.3. The
paper leaves the factor `D² = (1 - 4A)^{d/2}` of a draw out of its largest value. With
this factor the exponents are `D⁴ = (1 - 4A)^d` times smaller. As printed, theorem 4.2
is violated (`tests/papers/test_tails.py`); the bounds here are not.
"""

import numpy as np


def log_largest_draw(x, y, a):
    """Returns the log of the largest draw of the Gaussian kernel's estimator.

    Args:
        a: The parameter A, negative.

    Returns:
        Array of shape `(...)`: `(d/2) log(1 - 4A) - (1 - 4A) ‖x + y‖² / (8A) - ‖x‖² -
        ‖y‖²`, reached at `ω = -√(1 - 4A) (x + y) / (4A)`.

    Raises:
        ValueError: If A is not negative, because draws are unbounded then.

    Examples:
        >>> from keras_rfattn.papers import tails
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> round(float(tails.log_largest_draw(x, y, a=-0.1)), 4)
        1.8365
    """
    if not a < 0:
        raise ValueError(f"`a` must be negative to bound the draws. Received: a={a!r}.")
    lengths = np.sum(x * x, -1) + np.sum(y * y, -1)
    scale, z = 1 - 4 * a, np.sum((x + y) ** 2, -1)
    return x.shape[-1] / 2 * np.log(scale) - scale * z / (8 * a) - lengths


def log_tail(x, y, a, num_features, error):
    """Returns the log of a bound on `P(|estimate - K(x, y)| >= error)` (theorem 4.2).

    K is the Gaussian kernel `exp(-‖x - y‖² / 2)`, and the estimate is the mean of
    independent draws.

    Args:
        a: The parameter A, negative.
        num_features: Number m of draws.
        error: Positive number, the absolute error.

    Returns:
        Array of shape `(...)`: `log 2 - 2 m error² / largest²`, at most 0.

    Examples:
        >>> from keras_rfattn.papers import tails
        >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        >>> bound = tails.log_tail(x, y, a=-0.1, num_features=256, error=0.5)
        >>> round(float(bound), 4)
        -2.5583
    """
    exponent = 2 * num_features * error**2 * np.exp(-2 * log_largest_draw(x, y, a))
    return np.minimum(np.log(2) - exponent, 0.0)


def num_features_for(radius, dim, a, error, probability):
    """Returns how many draws make a softmax kernel's error small (theorem 4.3).

    Args:
        radius: Largest norm R of queries and keys, before each is scaled by
            `dim**-0.25`.
        dim: Head dim d.
        a: The parameter A, negative.
        error: Positive number, the absolute error of the kernel `exp(q · k / √d)`.
        probability: Probability that the error is exceeded, for any one pair.

    Returns:
        Number of draws, a float: `log(2 / probability) Γ D⁴ / (2 error²)` with the
        paper's `Γ = exp(-3 R² / (√d A))` replaced by the value for a pair's largest
        draw, `exp((2 - 1 / A) R² / √d)`.

    Raises:
        ValueError: If A is not negative, because draws are unbounded then.

    Examples:
        >>> from keras_rfattn.papers import tails
        >>> count = tails.num_features_for(
        ...     radius=1.0, dim=4, a=-0.1, error=0.5, probability=0.01)
        >>> round(float(count))
        16423
    """
    if not a < 0:
        raise ValueError(f"`a` must be negative to bound the draws. Received: a={a!r}.")
    square = radius**2 / np.sqrt(dim)
    # The exponent of softmax features subtracts half of ‖x‖² + ‖y‖² where that of
    # Gaussian features subtracts all of it.
    log_largest = dim / 2 * np.log(1 - 4 * a) - (1 - 4 * a) * square / (2 * a) - square
    return np.log(2 / probability) * np.exp(2 * log_largest) / (2 * error**2)
