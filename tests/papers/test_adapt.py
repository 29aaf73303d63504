"""What maps take from data is the optimum of their closed form."""

import numpy as np
import pytest

from keras_rfattn import feature_maps as maps
from keras_rfattn.feature_maps import fits
from keras_rfattn.kernels import variance
from keras_rfattn.papers import second_moments
from keras_rfattn.papers.gerf import optimal_parameters
from tests import helpers as h

pytestmark = pytest.mark.once

DIM = 8


def adapted(name, samples, **arguments):
    feature_map = maps.get(name, num_features=16, seed=1, **arguments)
    feature_map.build((None, None, samples[0][0].shape[0], DIM))
    assert not feature_map.is_calibrated
    feature_map.adapt(samples)
    assert feature_map.is_calibrated
    return feature_map


def samples(count=3):
    generator = np.random.default_rng(0)
    return [
        tuple(0.5 * generator.normal(size=(2, 2, 30, DIM)) + [[[[0.2]]], [[[-0.1]]]])
        for _ in range(count)
    ]


def test_poisson_rate_is_equation_12():
    data = samples()
    rate = h.to_numpy(adapted("poisson", data).parameter)
    products = [
        np.mean(np.sum((q[:, :, None] * k[:, None]) ** 2, -1), axis=(1, 2))
        for q, k in data
    ]
    h.assert_close(rate, np.sqrt(np.mean(products, axis=0) / DIM), 1e-6)
    # Of one pair, the minimum of equation 11.
    x, y = data[0][0][:1, :1], data[0][1][:1, :1]
    best = float(h.to_numpy(adapted("poisson", [(x, y)]).parameter)[0])
    values = [
        second_moments.log_moment_poisson((x * y)[0, 0], best * f)
        for f in (0.9, 1, 1.1)
    ]
    assert values[1] == min(values)


def test_geometric_probability_is_the_minimum_of_equation_13():
    data = samples()
    p = h.to_numpy(adapted("geometric", data).parameter)
    for head in range(2):
        products = np.mean(
            [np.abs(q[head]).mean(0) * np.abs(k[head]).mean(0) for q, k in data], 0
        )
        grid = np.linspace(0.01, 0.99, 981)
        values = [second_moments.log_moment_geometric(products, g) for g in grid]
        np.testing.assert_allclose(p[head], grid[np.argmin(values)], atol=2e-3)


@pytest.mark.parametrize("name", ["poisson_positive", "geometric_positive"])
def test_shift_lies_below_every_token(name):
    data = samples()
    feature_map = adapted(name, data)
    shift = h.to_numpy(feature_map.shift)
    lowest = np.min([np.minimum(q.min(1), k.min(1)) for q, k in data], axis=0)
    h.assert_close(shift, lowest, 1e-6)
    plain = adapted(name.replace("_positive", ""), data)
    assert np.all(h.to_numpy(feature_map.parameter) != h.to_numpy(plain.parameter))
    # New tokens below are clamped: positive features all the same.
    far = np.float32(lowest[None, :, None].swapaxes(1, 2) - 5)
    import keras

    scale = feature_map.key_features(keras.ops.convert_to_tensor(far)).log_scale
    assert np.all(np.isfinite(h.to_numpy(scale)))


@pytest.mark.parametrize("square, cross", [(2.0, 1.0), (2.0, -1.0), (30.0, 20.0)])
def test_gerf_is_at_least_as_good_as_favor_and_oprf(square, cross):
    real, imaginary, s = optimal_parameters(square, cross, DIM)

    def moment(a, s):
        z = square + s * cross
        return variance.log_moment_of_z(z, DIM, a, s) - s * square

    best = moment(complex(real, imaginary), s)
    assert best <= moment(0, -1) and best <= moment(0, 1)
    a = h.to_numpy(fits.best_a(np.float32(square + cross), DIM))
    assert best <= moment(float(a), 1) + 1e-6
    # A local minimum.
    for step in (0.01, -0.01, 0.01j, -0.01j):
        assert moment(complex(real, imaginary) + step, s) >= best - 1e-9


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("poisson", (0, -1.0, np.nan, np.inf), "rate.* must be positive and finite"),
        ("poisson_positive", (-1.0,), "rate.* must be positive and finite"),
        ("geometric", (0, 1, -0.1, 2.0, np.nan), "must be between 0 and 1"),
        ("geometric_positive", (1,), "must be between 0 and 1"),
    ],
)
def test_parameters_outside_their_range(name, wrong, message):
    for parameter in wrong:
        with pytest.raises(ValueError, match=f"{message}.*Received: parameter="):
            maps.get(name, parameter=parameter)


@pytest.mark.parametrize("name, parameter", [("poisson", 1e6), ("geometric", 1e-6)])
def test_counts_too_large(name, parameter):
    feature_map = maps.get(name, num_features=4, parameter=parameter, seed=0)
    with pytest.raises(ValueError, match="Counts would be too large .* a mean of 1e"):
        feature_map.build((None, None, 1, DIM))
    # Nor is anything changed where data asks for them.
    feature_map = maps.get("poisson_positive", num_features=4, seed=0)
    feature_map.build((None, None, 1, DIM))
    before = [h.to_numpy(w) for w in feature_map.weights]
    huge = np.linspace(0, 1e4, 3)[None, :, None] * np.ones(DIM)
    with pytest.raises(ValueError, match="Counts would be too large"):
        feature_map.adapt([(huge, huge)])
    for weight, value in zip(feature_map.weights, before, strict=True):
        np.testing.assert_array_equal(h.to_numpy(weight), value)
    assert not feature_map.is_calibrated


@pytest.mark.parametrize("form", ["complex", "real", "full"])
def test_a_matrix_that_cannot_be_inverted(form):
    feature_map = maps.get("complex_exponential", num_features=4, form=form, seed=0)
    feature_map.build((None, None, 2, DIM))
    before = h.to_numpy(feature_map.matrix)
    identity = np.eye(DIM) if form == "full" else np.ones(DIM)
    singular, small = np.stack([identity] * 2), np.stack([identity] * 2)
    singular[1, 0] = 0
    small[1, 0] *= 1e-9
    for wrong in (singular, small, np.nan * identity + singular):
        with pytest.raises(ValueError, match="must be invertible. Received"):
            feature_map.set_matrix(wrong)
    with pytest.raises(ValueError, match=r"shape \(2, 8.*Received: shape \(8,"):
        feature_map.set_matrix(identity)
    if form != "complex":
        with pytest.raises(ValueError, match="must be real"):
            feature_map.set_matrix(1j * np.stack([identity] * 2))
    h.assert_same(feature_map.matrix, before)
    feature_map.set_matrix(2 * np.stack([identity] * 2))


def test_complex_exponential_is_exact_at_the_means():
    data = [(np.full((1, 4, DIM), 0.3), np.full((1, 4, DIM), 0.5))]
    data[0][1][..., ::2] *= -1
    feature_map = adapted("complex_exponential", data)
    a = h.to_numpy(feature_map.matrix)[0]
    a = a[0] + 1j * a[1]
    x, y = data[0][0][0, 0], data[0][1][0, 0]
    np.testing.assert_allclose(a * x + y / a, 0, atol=1e-6)
    moment = second_moments.log_moment_complex_exponential(x, y, a)
    assert second_moments.variance(moment, x, y) < 1e-6
    real = adapted("complex_exponential", data, form="real")
    assert real.is_positive and np.all(h.to_numpy(real.matrix)[:, 1] == 0)
    size = np.sqrt(np.abs(y / x))
    h.assert_close(h.to_numpy(real.matrix)[0, 0], size, 1e-6)
