"""Optimal positive random features of the softmax kernel ("favorpp")."""

import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import check_choice, check_flag, is_number
from keras_rfattn.backend import (
    accumulated_matmul,
    elementwise_max,
    elementwise_min,
    known_true,
    where,
)
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.feature_maps.exponential import Exponential
from keras_rfattn.feature_maps.moments import mean_of
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.kernels.variance import (
    log_moment_generalized_exponential,
    log_moment_per_direction,
)
from keras_rfattn.ops.deferred import Exponents

POLICIES = ("auto", "batch", "stored")


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPP(Exponential, Adaptive, ProjectedFeatureMap):
    """FAVOR++: `D exp(A‖w‖² + B w·x - ‖x‖²/2) / √m` with the best real A <= 0.

    Here d is the head dim. With `B = √(1 - 4A)` and `D = (1 - 4A)^(d/4)`, the products
    of query and key features average to the softmax kernel for every A. `A = 0` is
    FAVOR+. The variance is least at

        A = (1 - 1/ρ) / 8,   ρ = 2d / (√((2z + d)² + 8dz) + 2z + d),

    which is the paper's equation 7 without its division by z. Here z is the mean of
    `‖x_i + y_j‖²` over pairs of tokens, computed from sums over tokens (equation 8).

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        statistics: Where z comes from. There is one z per key/value head.
            `"batch"`: z is measured on the current sequence, as in the paper. This
            raises in causal attention, where it would leak the future.
            `"stored"`: z is a weight, a moving average over training batches. Before
            the first batch it is 0, which gives FAVOR+.
            `"auto"` (default): z is the stored weight. While nothing is stored, it is
            measured on the current sequence in bidirectional self-attention.
        momentum: Momentum of the moving average, in [0, 1). Defaults to 0.99.
        per_direction: Whether each coordinate l has its own A, which is the optimum
            with d = 1 for the mean of `(x_l + y_l)²`. Defaults to `False`.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `statistics` or
            `projection` is unknown, `momentum` is not in [0, 1), or `per_direction` is
            not a boolean. In a call: if attention is causal and `statistics` is
            `"batch"`.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), equations 4 to 8.
    """

    def __init__(
        self,
        num_features=None,
        statistics="auto",
        momentum=0.99,
        per_direction=False,
        **kwargs,
    ):
        super().__init__(num_features, **kwargs)
        check_choice("statistics", statistics, POLICIES)
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1). Received: momentum={momentum!r}."
            )
        check_flag("per_direction", per_direction)
        self.policy = statistics
        self.momentum = momentum
        self.per_direction = bool(per_direction)

    @property
    def is_causal_safe(self):
        return self.policy != "batch"

    is_adaptive = is_causal_safe

    @property
    def measures_sequence(self):
        return self.policy != "stored"

    @property
    def is_generalized_exponential(self):
        return not self.per_direction

    def status(self, causal):
        if self.is_calibrated:
            return "calibrated"
        if self.policy == "batch" or (self.policy == "auto" and causal is False):
            return "statistics per sequence"
        return "uncalibrated"

    def log_moment(self, head=0, stats=None):
        if stats is None and not self.is_calibrated:
            return None
        stats = self.optimal_a(self.mean_square) if stats is None else stats
        stats = ops.convert_to_numpy(stats).astype("float64")
        if self.per_direction:
            a = stats.reshape(-1, *stats.shape[-2:])[:, head].mean(0)
            return lambda x, y: log_moment_per_direction(x, y, a)
        a = float(stats[..., head].mean())
        return lambda x, y: log_moment_generalized_exponential(x, y, a)

    def build(self, input_shape):
        super().build(input_shape)
        if self.is_adaptive:
            directions = (self.head_dim,) if self.per_direction else ()
            shape = self.num_heads, *directions
            self.mean_square = self.add_fixed("mean_square", "zeros", shape)

    def fit(self, samples):
        def mean_square(q, k):
            squares = np.mean(q * q, 1) + np.mean(k * k, 1)
            squares = squares + 2 * np.mean(q, 1) * np.mean(k, 1)
            return squares if self.per_direction else squares.sum(-1)

        self.mean_square.assign(mean_of(mean_square, samples))

    def statistics(
        self, query, key, query_mask=None, key_mask=None, causal=False, training=False
    ):
        """Returns A, of shape `(1, K)` or `(B, K)`, plus an axis H if per direction."""
        if causal and not self.is_causal_safe:
            raise ValueError(
                "`statistics='batch'` measures the whole sequence and would leak "
                "the future into causal attention. Received: "
                f"statistics={self.policy!r} in causal attention. Use "
                "statistics='stored' (or 'auto') instead."
            )
        if self.policy == "batch":
            return self.optimal_a(self.measure(query, key, query_mask, key_mask))
        is_stored = True
        if self.policy == "auto" and not causal:
            is_stored = ops.convert_to_tensor(self.updates) > 0
            is_stored = known_true(is_stored) or is_stored
        updating = training and self.trainable
        if updating or is_stored is not True:
            measured = self.measure(query, key, query_mask, key_mask)
        stored = ops.expand_dims(ops.convert_to_tensor(self.mean_square), 0)
        if is_stored is not True:
            stored = ops.where(is_stored, stored, measured)
        # Computed before the update, so that a step does not use its own statistic.
        parameter = self.optimal_a(stored)
        if updating:
            self.update(*mean_over_rows(measured, query_mask, key_mask))
        return parameter

    def measure(self, query, key, query_mask=None, key_mask=None):
        """Measures the mean of `‖q_i + k_j‖²` over real tokens, per row and head.

        The arguments are those of `statistics`.

        Returns:
            Array of shape `(B, K)`. If `per_direction`, the mean of each
            `(q_il + k_jl)²`, of shape `(B, K, H)`.
        """
        q_square, q_mean = masked_moments(query, query_mask)
        k_square, k_mean = masked_moments(key, key_mask)
        groups = query.shape[2] // self.num_heads
        if groups > 1:
            shape = (-1, self.num_heads, groups, query.shape[-1])
            q_square, q_mean = (
                ops.mean(ops.reshape(x, shape), axis=2) for x in (q_square, q_mean)
            )
        total = q_square + k_square + 2 * q_mean * k_mean
        return ops.stop_gradient(total if self.per_direction else ops.sum(total, -1))

    def update(self, measured, real=True):
        """Moves the stored statistic towards `measured`, by a moving average.

        Args:
            measured: The statistic of the batch, of shape `(K,)` or `(K, H)`.
            real: Whether the batch has a real token. If not, nothing changes.
        """
        real, count = ops.convert_to_tensor(real), ops.cast(self.updates, "float32")
        keep = elementwise_min(count / (count + 1), self.momentum)
        keep = where(real, keep, 1.0)
        stored = ops.convert_to_tensor(self.mean_square)
        new = keep * stored + (1 - keep) * ops.cast(measured, "float32")
        self.mean_square.assign(ops.where(real, new, stored))
        self.updates.assign(self.updates + ops.cast(real, "int32"))

    def optimal_a(self, z):
        """Returns the A of least variance for a mean square z (equation 7)."""
        d = 1 if self.per_direction else self.head_dim
        # The squares of larger z would overflow.
        z = elementwise_min(z, 1e15)
        root = ops.sqrt(ops.square(2 * z + d) + 8 * d * z)
        rho = 2 * d / (root + 2 * z + d)
        return (1 - 1 / rho) / 8

    def exponents(self, method, x, stats=None):
        return self.exponents_by(self.vectors, x, stats)

    def exponents_by(self, vectors, x, stats):
        """Returns the `Exponents` for random vectors `(K, H, m)` and parameters A."""
        if stats is None:
            stats = ops.zeros((self.num_heads, 1), dtype=x.dtype)
        elif not self.per_direction:
            stats = ops.expand_dims(stats, -1)
        # (B or 1, K, 1 or H)
        a = ops.reshape(ops.cast(stats, x.dtype), (-1, *stats.shape[-2:]))
        squares = ops.cast(ops.square(vectors), x.dtype)
        if a.shape[-1] == 1:
            squares = ops.sum(squares, axis=1, keepdims=True)
        spread = 1 - 4 * a
        constant = ops.log(spread) * (self.head_dim / a.shape[-1] / 4)
        constant = ops.sum(constant, axis=-1, keepdims=True)
        rows = ops.swapaxes(a, 0, 1)
        product = accumulated_matmul(rows, squares, is_precise=True)
        constant = constant + ops.swapaxes(product, 0, 1)
        vectors = ops.cast(ops.convert_to_tensor(vectors), x.dtype)
        vectors = vectors * ops.expand_dims(ops.sqrt(spread), -1)
        return Exponents(x, vectors, ops.expand_dims(constant, 2))

    def common_exponent(self, method, x, stats=None):
        return -half_square(x) - math.log(self.num_features) / 2

    def get_config(self):
        return {
            **super().get_config(),
            "statistics": self.policy,
            "momentum": self.momentum,
            "per_direction": self.per_direction,
        }


def masked_moments(x, mask):
    """Returns the means of `x²` and of `x` over real tokens, each `(B, N, H)`."""
    x = ops.cast(x, "float32")
    if mask is None:
        return ops.mean(ops.square(x), 1), ops.mean(x, 1)
    mask = ops.cast(mask, "bool")
    x = where(ops.expand_dims(mask, (2, 3)), x, 0)
    count = ops.expand_dims(ops.sum(ops.cast(mask, "float32"), axis=1), (1, 2))
    count = elementwise_max(count, 1)
    return ops.sum(ops.square(x), axis=1) / count, ops.sum(x, axis=1) / count


def mean_over_rows(measured, query_mask, key_mask):
    """Averages `(B, ...)` over rows with real queries and keys, if there are any."""
    real = ops.ones_like(ops.reshape(measured, (ops.shape(measured)[0], -1))[:, 0])
    for mask in (query_mask, key_mask):
        if mask is not None:
            real = real * ops.cast(ops.any(ops.cast(mask, "bool"), 1), real.dtype)
    total = ops.sum(real)
    rows = ops.reshape(real, (-1, *[1] * (len(measured.shape) - 1)))
    mean = ops.sum(measured * rows, axis=0) / ops.maximum(total, 1)
    return mean, total > 0
