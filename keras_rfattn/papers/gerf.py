"""Generalized exponential random features with complex parameters ("gerf")."""

import math

import numpy as np
from keras import ops

from keras_rfattn.feature_maps.base import half_square, number
from keras_rfattn.feature_maps.fits import mean_of
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.weights import Adaptive
from keras_rfattn.kernels.variance import log_moment_of_z
from keras_rfattn.papers.complex_exponential import exponential
from keras_rfattn.papers.second_moments import log_moment_generalized_exponential


class Gerf(Adaptive, ProjectedFeatureMap):
    """GERF: `D exp(A‖w‖² + B w·x - s‖x‖²/2) / √m` with complex A and s = ±1.

    Here `B = √(s (1 - 4A))`, `D = (1 - 4A)^(d/4)`, and d is the head dim. Keys use
    `s B` in place of B. The real part of the products averages to the softmax kernel.
    It is computed in real arithmetic: features are `[Re, Im]` for queries and
    `[Re, -Im]` for keys, of width `2 m`. They are signed in general. `A = 0` gives
    `FavorPlus` for s = 1, which is the initial value, and `Favor` for s = -1.

    `adapt` chooses A and s for each head. It minimizes the second moment (equation 6)
    for the data's average `‖x + s y‖²` (equation 8), with one L-BFGS-B run for each s.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; `num_features` is m.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), section 3.1. The estimate
        is the plain product of features; the conjugate in equation 1 is a misprint.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.Gerf(num_features=32, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> feature_map.is_calibrated, feature_map.output_dim
        (True, 64)
    """

    is_positive = False
    is_symmetric = False
    is_generalized_exponential = True

    @property
    def output_dim(self):
        return 2 * self.num_features

    def build(self, input_shape):
        super().build(input_shape)
        # A row holds Re A, Im A and s.
        start = np.tile(np.float32([0, 0, 1]), (self.num_heads, 1))
        self.parameters = self.add_fixed("parameters", start)

    def fit(self, samples):
        def moments(q, k):
            square = np.sum(q * q, -1).mean(1) + np.sum(k * k, -1).mean(1)
            return np.stack([square, 2 * np.sum(q.mean(1) * k.mean(1), -1)])

        squares, crosses = mean_of(moments, samples)
        best = [
            optimal_parameters(square, cross, self.head_dim)
            for square, cross in zip(squares, crosses, strict=True)
        ]
        self.parameters.assign(best)

    def sign(self, head=0):
        return int(number(self.parameters, head)[2])

    def log_moment(self, head=0):
        real, imaginary, s = number(self.parameters, head)
        a = complex(real, imaginary)
        return lambda x, y: log_moment_generalized_exponential(x, y, a, int(s))

    def query_features(self, x):
        return self._features(x, 1, 1)

    def key_features(self, x):
        return self._features(x, self._parameter(2, x), -1)

    def _parameter(self, i, x):
        return self.per_head(self.parameters[:, i : i + 1], x)

    def _features(self, x, factor, conjugation):
        """Returns features for `factor · B`, with an argument of `exponential`."""
        real, imaginary, s = (self._parameter(i, x) for i in range(3))
        # `size` and `angle` are the polar form of 1 - 4A. `turn` is the angle of B, to
        # which √s adds π/2 if s = -1.
        size = ops.sqrt(ops.square(1 - 4 * real) + ops.square(4 * imaginary))
        angle = ops.arctan2(-4 * imaginary, 1 - 4 * real)
        turn = angle / 2 + (1 - s) * (math.pi / 4)
        b_real = factor * ops.sqrt(size) * ops.cos(turn)
        b_imaginary = factor * ops.sqrt(size) * ops.sin(turn)

        projected = self.project(x)
        squares = ops.square(ops.cast(self.vectors, x.dtype))
        squares = self.per_head(ops.sum(squares, axis=1), x)
        exponent = real * squares + b_real * projected - s * half_square(x)
        exponent = exponent + self.head_dim / 4 * ops.log(size)
        phase = imaginary * squares + b_imaginary * projected
        phase = phase + self.head_dim / 4 * angle
        return exponential(exponent, phase, conjugation)


def optimal_parameters(square, cross, dim):
    """Returns `(Re A, Im A, s)` of the least second moment.

    `square` is the mean of `‖x‖² + ‖y‖²`, and `cross` that of `2 x · y`.
    """
    from scipy import optimize

    results = []
    for s in (1, -1):
        z = max(square + s * cross, 0.0)

        def moment(a, z=z, s=s):
            value = log_moment_of_z(z, dim, complex(a[0], a[1]), s)
            return float(value) - s * square

        found = optimize.minimize(
            moment, (-0.01, 0.01), method="L-BFGS-B",
            bounds=((None, 0.12), (None, None)), options={"maxiter": 50},
        )  # fmt: skip
        results.append((found.fun, (found.x[0], found.x[1], s)))
        # A = 0 is a candidate too, in case the search ends at a larger moment.
        results.append((moment((0.0, 0.0)), (0.0, 0.0, s)))
    return min(results)[1]
