"""Discretely induced random features: random monomials ("poisson", "geometric")."""

import math

import numpy as np
from keras import ops

from keras_rfattn.arguments import derive_seed, is_number, is_positive
from keras_rfattn.backend import clip
from keras_rfattn.feature_maps.base import number
from keras_rfattn.feature_maps.fits import mean_of
from keras_rfattn.feature_maps.projected import RandomFeatureMap
from keras_rfattn.feature_maps.weights import Adaptive, integer
from keras_rfattn.ops.features import Features
from keras_rfattn.papers.counts import GeometricCounts, PoissonCounts
from keras_rfattn.papers.second_moments import (
    log_moment_geometric,
    log_moment_poisson,
    log_moment_shifted,
)

# Smaller magnitudes are replaced by this before a logarithm is taken, so that it is
# finite. 0⁰ = 1 stays exact, because the power 0 multiplies the logarithm.
TINY = 1e-30
# Smallest shifted entry of the positive variants, as in the paper.
EPSILON = 1e-8


class Monomials(Adaptive, RandomFeatureMap):
    """Features `Π_l x_l^ω_l / √(m Π_l ω_l! P(ω_l))` of the softmax kernel.

    The kernel `exp(x · y)` is a product of Taylor series over the coordinates l. For
    each coordinate, a random vector ω draws one term, whose power ω_l has probability
    `P(ω_l)`. These are equations 9 and 10 of "Chefs' Random Tables" times
    `exp(‖x‖²/2)`, which turns the Gaussian kernel into the softmax kernel. Features are
    signed unless all entries are positive.

    Subclasses set the distribution of the counts ω_l and compute its best parameter for
    magnitudes `|x_l y_l|`. On data these are `(E |x_l|ᵖ E |y_l|ᵖ)^(1/p)`, where p is
    the attribute `power`.

    Args:
        num_features: Number m of random vectors ω, twice the head dim by default.
        parameter: Parameter of the distribution. If `None`, the optimum for entries of
            unit variance before scaling. `adapt` replaces it.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.
    """

    is_positive = False
    distribution = None
    log_moment_of_products = None
    power = None
    # The value of |x_l y_l| √d that is assumed before `adapt`. It suits standard normal
    # entries that were scaled.
    typical_product = 1.0

    def __init__(self, num_features=None, parameter=None, seed=None, **kwargs):
        super().__init__(num_features, seed, **kwargs)
        if parameter is not None:
            self._check(parameter)
        self.initial = parameter

    def build(self, input_shape):
        heads, dim = input_shape[-2:]
        # Only NumPy is used here, because a layer may be built during tracing.
        start = self.initial
        if start is None:
            start = self.optimum(np.full(dim, self.typical_product * dim**-0.5))
        self._start = np.full(heads, start)
        super().build(input_shape)
        counts = self.initializer(0).counts((heads, dim, self.num_features))
        self.parameter = self.add_fixed("parameter", self._start)
        self.offsets = self.add_fixed("offsets", self._offsets(counts, self._start))

    def initializer(self, draw, *which):
        return self._distribution(self._start, draw)

    def _distribution(self, parameter, draw):
        seed = self.seed if draw == 0 else derive_seed(self.seed, draw)
        return self.distribution(parameter, seed)

    def _offsets(self, counts, parameter):
        """Returns `-½ log Π_l k_l! P(k_l)` for counts k of each vector, `(K, m)`."""
        counts = counts.astype("float64")
        terms = -self.log_weight(counts, parameter[:, None, None]) / 2
        return terms.sum(axis=1)

    def assign_vectors(self, draw):
        self._set(ops.convert_to_numpy(self.parameter).astype("float64"), draw)

    def _set(self, parameter, draw):
        """Draws the counts of each head for the head's parameter, and assigns both."""
        counts = self._distribution(parameter, draw).counts(self.vectors.shape)
        self.parameter.assign(parameter)
        self.vectors.assign(counts)
        self.offsets.assign(self._offsets(counts, parameter))

    def fit(self, samples):
        def powers(q, k):
            means = (np.mean(np.abs(x) ** self.power, axis=1) for x in (q, k))
            return next(means) * next(means)

        products = mean_of(powers, samples) ** (1 / self.power)
        parameter = np.array([self.optimum(row) for row in products])
        self._set(parameter, integer(self.draws))

    def log_moment(self, head=0):
        parameter = number(self.parameter, head)
        return lambda x, y: self.log_moment_of_products(x * y, parameter)

    def key_features(self, x):
        log_scale = self._log_monomials(clip(ops.abs(x), low=TINY))
        odd = ops.mod(self.project(ops.cast(x < 0, x.dtype)), 2)
        return Features(1 - 2 * odd, log_scale)

    def _log_monomials(self, x):
        offsets = self.per_head(self.offsets, x) - math.log(self.num_features) / 2
        return self.project(ops.log(x)) + offsets

    def get_config(self):
        return {**super().get_config(), "parameter": self.initial}


class Poisson(Monomials):
    """Poisson random features: `exp(λd/2) Π_l x_l^ω_l λ^(-ω_l/2) / √m`.

    The counts ω_l are drawn from a Poisson distribution with mean λ, and d is the head
    dim. The variance is least at `λ = √(Σ_l x_l² y_l² / d)`. On data, `adapt` uses the
    average of the sum (equation 12).

    Args:
        num_features: Number m of random vectors ω, twice the head dim by default.
        parameter: λ > 0. If `None`, the optimum for entries of unit variance before
            scaling. `adapt` replaces it.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `parameter` is not
            positive and finite.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), section 3.2.1.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.Poisson(num_features=32, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> tuple(feature_map.parameter.shape)
        (1,)
    """

    distribution = PoissonCounts
    log_moment_of_products = staticmethod(log_moment_poisson)
    power = 2

    def _check(self, rate):
        if not is_positive(rate):
            raise ValueError(
                "`parameter` (the rate) must be positive and finite. Received: "
                f"parameter={rate!r}."
            )

    @staticmethod
    def log_weight(counts, rate):
        """Returns `log(k! P(k))` for counts k."""
        return counts * np.log(rate) - rate

    @staticmethod
    def optimum(products):
        """Returns the best λ for magnitudes `|x_l y_l|`, of shape `(d,)`."""
        return max(float(np.sqrt(np.mean(products**2))), EPSILON)


class Geometric(Monomials):
    """Geometric random features: `p^(-d/2) Π_l x_l^ω_l (1-p)^(-ω_l/2) ω_l!^(-½) / √m`.

    The counts ω_l are drawn with `P(k) = p (1 - p)ᵏ`, and d is the head dim. A bounded
    Brent search finds the p that minimizes the variance (equation 13) for the averages
    of `|x_l y_l|` (equation 14).

    Args:
        num_features: Number m of random vectors ω, twice the head dim by default.
        parameter: p in (0, 1). If `None`, the optimum for entries of unit variance
            before scaling. `adapt` replaces it.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `parameter` is not
            between 0 and 1.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), section 3.2.2.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.Geometric(num_features=32, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> tuple(feature_map.parameter.shape)
        (1,)
    """

    distribution = GeometricCounts
    log_moment_of_products = staticmethod(log_moment_geometric)
    power = 1

    def _check(self, p):
        if not is_number(p) or not 0 < p < 1:
            raise ValueError(
                "`parameter` (the success probability) must be between 0 and 1. "
                f"Received: parameter={p!r}."
            )

    @staticmethod
    def log_weight(counts, p):
        """Returns `log(k! P(k))` for counts k."""
        table = np.arange(counts.max() + 1)
        log_factorial = np.cumsum(np.log(np.maximum(table, 1)))[counts.astype(int)]
        return np.log(p) + counts * np.log1p(-p) + log_factorial

    @staticmethod
    def optimum(products):
        """Returns the best p for magnitudes `|x_l y_l|`, of shape `(d,)`."""
        from scipy import optimize

        found = optimize.minimize_scalar(
            lambda p: log_moment_geometric(products, p),
            bounds=(1e-6, 1 - 1e-6),
            method="bounded",
            options={"maxiter": 100},
        )
        return float(found.x)


class Shifted:
    """Mixin that makes monomials positive by shifting queries and keys.

    If c is below every entry, `x - c` and `y - c` are positive. Since
    `x · y = (x-c)·(y-c) + c·x + c·y - ‖c‖²`, the map adds the last three terms to the
    exponent. `PoissonPositive` says how c is chosen.
    """

    is_positive = True
    # Two entries that are shifted by four standard deviations have products near 4 · 4.
    typical_product = 16.0

    def build(self, input_shape):
        super().build(input_shape)
        heads, dim = self.num_heads, self.head_dim
        self.shift = self.add_fixed("shift", np.full((heads, dim), -4 * dim**-0.25))

    def fit(self, samples):
        lowest = [np.minimum(q.min(1), k.min(1)) for q, k in samples]
        shift = np.min(lowest, axis=0) - EPSILON
        below = shift[:, None]
        super().fit([(q - below, k - below) for q, k in samples])
        self.shift.assign(shift)

    def log_moment(self, head=0):
        parameter, c = number(self.parameter, head), number(self.shift, head)

        def shifted(x, y):
            moment = self.log_moment_of_products((x - c) * (y - c), parameter)
            return log_moment_shifted(moment, x, y, c)

        return shifted

    def key_features(self, x):
        shift = self.per_head(self.shift, x)
        log_scale = self._log_monomials(clip(x - shift, low=EPSILON))
        factor = ops.sum(shift * (x - shift / 2), axis=-1, keepdims=True)
        return Features(None, log_scale + factor)


class PoissonPositive(Shifted, Poisson):
    """PoisRF+: Poisson features of `x - c`, whose entries are positive.

    `adapt` sets c below every entry of its data. Until then, c is four standard
    deviations below 0 for standard normal entries. Entries of new data below c are
    raised to 1e-8 above c. The estimate is biased only for these. The arguments are
    those of `Poisson`.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), section 3.2.3.
    """


class GeometricPositive(Shifted, Geometric):
    """GeomRF+: geometric features of `x - c`, whose entries are positive.

    `adapt` sets c below every entry of its data, as `PoissonPositive` describes. The
    arguments are those of `Geometric`.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), section 3.2.3.
    """
