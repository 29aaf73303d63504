"""Bounds on tails, against draws; the printed ones do not hold."""

import numpy as np
import pytest

from keras_rfattn.papers import tails

pytestmark = pytest.mark.once

DRAWS = 20_000


def draws(x, y, a, count, seed=0):
    """Independent draws of the Gaussian kernel's estimate, `(count,)`."""
    omega = np.random.default_rng(seed).normal(size=(count, x.shape[-1]))
    scale, lengths = 1 - 4 * a, np.sum(x * x) + np.sum(y * y)
    log = 2 * a * np.sum(omega**2, -1) + np.sqrt(scale) * omega @ (x + y) - lengths
    return np.exp(log + x.shape[-1] / 2 * np.log(scale))


def pair(dim, length, seed=1):
    x, y = np.random.default_rng(seed).normal(size=(2, dim))
    return x * length / np.linalg.norm(x), y * length / np.linalg.norm(y)


def test_no_draw_is_above_the_largest():
    for dim, length, a in ((2, 0.5, -0.1), (4, 1.0, -0.3), (8, 2.0, -1.0)):
        x, y = pair(dim, length)
        largest = tails.log_largest_draw(x, y, a)
        found = draws(x, y, a, DRAWS)
        assert np.log(found.max()) <= largest
        # And it is attained.
        omega = -np.sqrt(1 - 4 * a) * (x + y) / (4 * a)
        log = 2 * a * omega @ omega + np.sqrt(1 - 4 * a) * omega @ (x + y)
        log += dim / 2 * np.log(1 - 4 * a) - x @ x - y @ y
        np.testing.assert_allclose(log, largest, rtol=1e-12)


@pytest.mark.parametrize("a", [-0.05, -0.3, -1.0])
def test_the_tail_is_never_heavier(a):
    x, y = pair(2, 0.4)
    kernel, m = np.exp(-np.sum((x - y) ** 2) / 2), 20
    means = draws(x, y, a, DRAWS * m).reshape(DRAWS, m).mean(-1)
    np.testing.assert_allclose(means.mean(), kernel, rtol=0.02)
    informative = 0
    for error in (0.05, 0.1, 0.2, 0.4, 0.8):
        bound = np.exp(tails.log_tail(x, y, a, m, error))
        assert np.mean(np.abs(means - kernel) >= error) <= bound
        informative += bound < 0.9
    assert informative >= 1


def test_as_printed_it_is_violated():
    x, y = pair(16, 0.3)
    a, m, error, kernel = -0.5, 20, 2.0, np.exp(-np.sum((x - y) ** 2) / 2)
    means = draws(x, y, a, DRAWS * m).reshape(DRAWS, m).mean(-1)
    frequency = np.mean(np.abs(means - kernel) >= error)
    lengths = np.sum(x * x) + np.sum(y * y)
    printed = 2 * np.exp(-m * error**2 / 2 * np.exp(lengths / (2 * a)))
    assert printed < 1e-10 < 0.03 < frequency
    assert frequency <= np.exp(tails.log_tail(x, y, a, m, error))


def test_enough_draws_are_enough():
    dim, radius, a, error, probability = 2, 0.6, -0.1, 0.3, 0.05
    m = int(np.ceil(tails.num_features_for(radius, dim, a, error, probability)))
    x, y = (v * dim**-0.25 for v in pair(dim, radius))
    factor = np.exp((np.sum(x * x) + np.sum(y * y)) / 2)
    means = factor * draws(x, y, a, 2000 * m).reshape(2000, m).mean(-1)
    assert np.mean(np.abs(means - np.exp(x @ y)) >= error) <= probability


def test_positive_a_is_refused():
    for a in (0.0, 0.1):
        with pytest.raises(ValueError, match="must be negative"):
            tails.log_largest_draw(*pair(2, 1.0), a)
        with pytest.raises(ValueError, match="must be negative"):
            tails.num_features_for(1.0, 2, a, 0.1, 0.1)
