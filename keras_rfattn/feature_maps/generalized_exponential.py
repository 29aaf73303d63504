"""Optimal positive random features of the softmax kernel ("favorpp")."""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.ops.features import Features

POLICIES = ("auto", "batch", "stored")


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPP(FeatureMap):
    """FAVOR++: `D exp(A‖w‖² + B w·x - ‖x‖²/2) / √m` with the best real A <= 0.

    `B = √(1 - 4A)` and `D = (1 - 4A)^(d/4)` keep the products' average at the
    softmax kernel for every A; `A = 0` is FAVOR+. The variance is least at

        A = (1 - 1/ρ) / 8,   ρ = 2d / (√((2z + d)² + 8dz) + 2z + d)

    (the paper's equation 7 without its division by z), where z is the mean of
    `‖x_i + y_j‖²` over pairs, taken from sums over tokens (equation 8).

    Args:
        num_features: Number m of random vectors, 256 by default.
        statistics: Where z comes from, per key/value head.
            `"batch"`: from the sequence at hand, as in the paper; raises in
            causal attention, where it would leak the future.
            `"stored"`: from a weight, a moving average over training batches; 0
            (which is FAVOR+) before any.
            `"auto"` (default): stored; where nothing is stored yet and the
            attention is bidirectional self-attention, from the sequence.
        momentum: Of the moving average. Defaults to 0.99.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), equations 4 to 8.
    """

    def __init__(self, num_features=None, statistics="auto", momentum=0.99, **kwargs):
        super().__init__(num_features, **kwargs)
        if statistics not in POLICIES:
            raise ValueError(
                f"`statistics` must be one of {POLICIES}. "
                f"Received: statistics={statistics!r}."
            )
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1). Received: momentum={momentum}."
            )
        self.policy = statistics
        self.momentum = momentum
        self.calibrating = False

    @property
    def is_causal_safe(self):
        return self.policy != "batch"

    @property
    def stores_statistics(self):
        """Whether z can be stored at all."""
        return self.policy != "batch"

    def build(self, input_shape):
        super().build(input_shape)
        if not self.stores_statistics:
            return
        self.mean_square = self.add_weight(
            name="mean_square", shape=(self.num_heads,), initializer="zeros",
            dtype="float32", trainable=False, autocast=False,
        )  # fmt: skip
        self.updates = self.add_weight(
            name="updates", shape=(), initializer="zeros", dtype="int32",
            trainable=False, autocast=False,
        )  # fmt: skip

    @property
    def is_calibrated(self):
        """Whether z has been stored."""
        if not self.built or not self.stores_statistics:
            return False
        return int(ops.convert_to_numpy(self.updates)) > 0

    def statistics(
        self,
        query,
        key,
        query_mask=None,
        key_mask=None,
        causal=False,
        training=False,
    ):
        """The parameter A, of shape `(K,)` or `(B, K)`; see the base class."""
        if causal and not self.is_causal_safe:
            raise ValueError(
                "`statistics='batch'` measures the whole sequence and would leak "
                "the future into causal attention. Received: "
                f"statistics={self.policy!r} in causal attention. Use "
                "statistics='stored' (or 'auto') instead."
            )
        updating = self.calibrating or (training and self.trainable)
        updating = updating and self.stores_statistics
        measured = None
        if updating or (self.policy != "stored" and not causal):
            measured = self.measure(query, key, query_mask, key_mask)
        if self.policy == "batch":
            return self.optimal_a(measured)
        stored = ops.convert_to_tensor(self.mean_square)
        if self.policy == "auto" and not causal:
            stored = ops.where(ops.greater(self.updates, 0), stored, measured)
        # Before the update: a step must not see what it is about to store.
        parameter = self.optimal_a(stored)
        if updating:
            self.update(*mean_over_rows(measured, query_mask, key_mask))
        return parameter

    def measure(self, query, key, query_mask=None, key_mask=None):
        """The mean of `‖q_i + k_j‖²` over real tokens, per row and head: `(B, K)`."""
        groups = query.shape[2] // self.num_heads
        q_square, q_mean = masked_moments(query, query_mask)
        k_square, k_mean = masked_moments(key, key_mask)
        shape = (-1, self.num_heads, groups)
        q_square = ops.mean(ops.reshape(q_square, shape), axis=2)
        q_mean = ops.mean(ops.reshape(q_mean, (*shape, query.shape[-1])), axis=2)
        cross = ops.sum(q_mean * k_mean, axis=-1)
        return ops.stop_gradient(q_square + k_square + 2 * cross)

    def update(self, measured, real=True):
        """Moves the stored statistic towards `measured`, of shape `(K,)`.

        In training by a moving average, in calibration to the mean over batches.
        Nothing moves unless `real`: a batch may hold padding alone.
        """
        count = ops.cast(self.updates, "float32")
        keep = count / (count + 1)
        if not self.calibrating:
            keep = ops.minimum(keep, self.momentum)
        keep = ops.where(real, keep, 1.0)
        new = keep * self.mean_square + (1 - keep) * ops.cast(measured, "float32")
        self.mean_square.assign(new)
        self.updates.assign(self.updates + ops.cast(real, "int32"))

    def optimal_a(self, z):
        """The A of least variance for a mean square z (equation 7)."""
        d = self.head_dim
        root = ops.sqrt(ops.square(2 * z + d) + 8 * d * z)
        rho = 2 * d / (root + 2 * z + d)
        return (1 - 1 / rho) / 8

    def key_features(self, x, stats=None):
        """Features of `(B, S, K, H)`; `stats` is A, of shape `(K,)` or `(B, K)`."""
        projected = self.project(x)
        if stats is None:
            stats = ops.zeros((self.num_heads,), dtype=projected.dtype)
        groups = x.shape[-2] // self.num_heads
        a = ops.repeat(ops.cast(stats, projected.dtype), groups, axis=-1)
        a = a[:, None, :, None] if len(stats.shape) == 2 else a[:, None]
        squares = ops.sum(ops.square(ops.cast(self.vectors, a.dtype)), axis=1)
        squares = ops.repeat(squares, groups, axis=0)
        constant = self.head_dim / 4 * ops.log(1 - 4 * a)
        exponent = a * squares + ops.sqrt(1 - 4 * a) * projected + constant
        exponent = exponent - half_square(ops.cast(x, a.dtype))
        return Features(None, exponent - math.log(self.num_features) / 2)

    def get_config(self):
        return {
            **super().get_config(),
            "statistics": self.policy,
            "momentum": self.momentum,
        }


def masked_moments(x, mask):
    """Mean square norm `(B, N)` and mean `(B, N, H)` over the real tokens of x."""
    x = ops.cast(x, "float32")
    if mask is None:
        return ops.mean(ops.sum(ops.square(x), -1), 1), ops.mean(x, 1)
    mask = ops.cast(mask, "bool")
    x = ops.where(mask[:, :, None, None], x, 0)
    count = ops.maximum(ops.sum(ops.cast(mask, "float32"), axis=1), 1)
    square = ops.sum(ops.sum(ops.square(x), -1), 1) / count[:, None]
    return square, ops.sum(x, axis=1) / count[:, None, None]


def mean_over_rows(measured, query_mask, key_mask):
    """The mean of `(B, K)` over rows that hold a real token, and whether any does."""
    real = ops.ones_like(measured[:, 0])
    for mask in (query_mask, key_mask):
        if mask is not None:
            real = real * ops.cast(ops.any(ops.cast(mask, "bool"), 1), real.dtype)
    total = ops.sum(real)
    mean = ops.sum(measured * real[:, None], axis=0) / ops.maximum(total, 1)
    return mean, total > 0
