"""Data-dependent conditioning: any softmax map on better placed queries and keys."""

import keras
import numpy as np
from keras import ops

import keras_rfattn.feature_maps.registry as registry
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.base import number
from keras_rfattn.feature_maps.favorpp import FavorPP
from keras_rfattn.feature_maps.moments import balance
from keras_rfattn.feature_maps.moments import mean_of
from keras_rfattn.feature_maps.moments import second_moments
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import precise_einsum
from keras_rfattn.ops.precision import wide_dtype

STEPS = ("center", "balance", "rotate")


@keras.saving.register_keras_serializable("keras_rfattn")
class Conditioned(Adaptive, FeatureMap):
    """A softmax map of `A (q - c_q)` and `A⁻ᵀ (k - c_k)`.

    Softmax attention depends on neither the centers nor the matrix:
    `q·k = A(q - c_q) · A⁻ᵀ(k - c_k) + c_q·k + q·c_k - c_q·c_k`, and the last terms go
    into the exponents. A random-feature estimate does depend on them: its variance
    grows with `exp(‖x + y‖²)` of what the features see. Model weights are untouched.

    Kin of dense-exponential random features (DERF; Likhosherstov et al., "FAVOR#: Sharp
    Attention Kernel Approximations via New Classes of Positive Random Features", 2023),
    whose exponents have matrices chosen in closed form from second moments of both
    sides. What differs: queries and keys are centered first, and the matrices stand
    around any estimator of softmax instead of inside one.

    Before `adapt` nothing is changed; `adapt` sets, by the steps up to `up_to`,

    - `"center"`: c_q and c_k, the mean query and the mean key;
    - `"balance"`: A, which makes the covariances of both sides equal (the geometric
      mean of their positive matrices);
    - `"rotate"`: a rotation onto the eigenvectors of `E (x + y)(x + y)ᵀ`, for maps
      that treat each direction by itself.

    Args:
        feature_map: A map of kernel softmax, its name or config.
        up_to: `"center"`, `"balance"` (default) or `"rotate"`.
        seed: Of the inner map; its own if `None`.

    Raises:
        ValueError: If the map estimates another kernel than softmax.
    """

    is_symmetric = False
    # Whether matrices and centers are trained besides.
    is_trained = False

    def __init__(self, feature_map="favorpp", up_to="balance", seed=None, **kwargs):
        inner = registry.get(feature_map)
        if inner.kernel != "softmax":
            raise ValueError(
                "Conditioning keeps softmax attention and no other. Received: "
                f"feature_map={feature_map!r}, of kernel {inner.kernel!r}."
            )
        if up_to not in STEPS:
            raise ValueError(
                f"`up_to` must be one of {STEPS}. Received: up_to={up_to!r}."
            )
        seed = inner.seed if seed is None else seed
        super().__init__(seed=seed, **kwargs)
        self.inner = inner.reseeded(self.seed)
        self.num_features = inner.num_features
        self.up_to = up_to

    @property
    def is_positive(self):
        return self.inner.is_positive

    @property
    def is_unbiased(self):
        return self.inner.is_unbiased

    @property
    def is_causal_safe(self):
        return self.inner.is_causal_safe

    @property
    def assumes_equal_lengths(self):
        return self.inner.assumes_equal_lengths

    @property
    def has_exponents(self):
        # One that moves tokens itself has no vectors for those that are not moved.
        return self.inner.has_exponents and not isinstance(self.inner, Conditioned)

    @property
    def output_dim(self):
        return self.inner.output_dim

    @property
    def features_per_scale(self):
        return self.inner.features_per_scale

    def build(self, input_shape):
        super().build(input_shape)
        self.inner.build(input_shape)
        heads, dim = self.num_heads, self.head_dim
        identity = np.broadcast_to(np.eye(dim, dtype="float32"), (heads, dim, dim))
        add = self.add_trained if self.is_trained else self.add_fixed
        self.query_matrix = add("query_matrix", identity)
        self.key_matrix = add("key_matrix", identity)
        self.query_center = add("query_center", "zeros", (heads, dim))
        self.key_center = add("key_center", "zeros", (heads, dim))

    def draw_again(self):
        self.inner.draw_again()

    def sign(self, head=0):
        return self.inner.sign(head)

    def log_moment(self, head=0, stats=None):
        return self.inner.log_moment(head, stats)

    def relative_covariance(self, head=0):
        return self.inner.relative_covariance(head)

    def meets(self, query, key, head=0):
        sides = (
            (query, self.query_matrix, self.query_center),
            (key, self.key_matrix, self.key_center),
        )
        moved = ((x - number(c, head)) @ number(a, head).T for x, a, c in sides)
        return self.inner.meets(*moved, head)

    def fit(self, samples):
        c_q, c_k = mean_of(lambda q, k: np.stack([q.mean(1), k.mean(1)]), samples)
        samples = [(q - c_q[:, None], k - c_k[:, None]) for q, k in samples]
        a = np.broadcast_to(np.eye(self.head_dim), self.query_matrix.shape)
        if self.up_to != "center":
            a = balance(*second_moments(samples))
        if self.up_to == "rotate":
            a = self._rotation(_through(a, samples)).swapaxes(-1, -2) @ a
        samples = _through(a, samples)
        for weight, value in (
            (self.query_matrix, a),
            (self.key_matrix, np.linalg.inv(a).swapaxes(-1, -2)),
            (self.query_center, c_q),
            (self.key_center, c_k),
        ):
            weight.assign(value.astype("float32"))
        if self.inner.is_adaptive:
            self.inner.adapt(samples)

    def _rotation(self, samples):
        """Eigenvectors of `E (x + y)(x + y)ᵀ` over pairs that meet, in columns."""

        def cross(q, k):
            product = np.einsum("kh,ki->khi", q.mean(1), k.mean(1))
            return product + product.swapaxes(-1, -2)

        total = second_moments(samples).sum(0) + mean_of(cross, samples)
        return np.linalg.eigh(total)[1]

    def statistics(self, query, key, *args, **kwargs):
        query = self._transform(query, self.query_matrix, self.query_center)
        key = self._transform(key, self.key_matrix, self.key_center)
        return self.inner.statistics(query, key, *args, **kwargs)

    def query_features(self, x, stats=None):
        features = self.inner.query_features(
            self._transform(x, self.query_matrix, self.query_center), stats
        )
        center = self._center(self.key_center, x)
        x = ops.cast(x, wide_dtype(x))
        return _shift(features, center, x - self._center(self.query_center, x))

    def key_features(self, x, stats=None):
        features = self.inner.key_features(
            self._transform(x, self.key_matrix, self.key_center), stats
        )
        return _shift(features, self._center(self.query_center, x), x)

    def exponents(self, method, x, stats=None):
        matrix, center, other = self._side(method)
        x = x - self._center(center, x)
        found = self.inner.exponents(method, x, stats)
        # Products with the matrix and the center are some with vectors, which are few.
        matrix, center, other = (
            ops.cast(ops.expand_dims(ops.convert_to_tensor(y), 0), x.dtype)
            for y in (matrix, center, other)
        )
        vectors = accumulated_matmul(
            matrix, found.vectors, transpose_a=True, is_precise=True
        )
        bias = found.bias
        if method == "key_features":
            constant = ops.sum(center * other, axis=-1)
            bias = ops.cast(bias, x.dtype) + ops.expand_dims(constant, (-2, -1))
        return found._replace(vectors=vectors + ops.expand_dims(other, -1), bias=bias)

    def common_exponent(self, method, x, stats=None):
        matrix = ops.cast(ops.convert_to_tensor(self._side(method)[0]), x.dtype)
        inner = accumulated_matmul(x, matrix, transpose_b=True, is_precise=True)
        return self.inner.common_exponent(method, inner, stats)

    def _side(self, method):
        """The matrix and center of a side, and the other's center."""
        if method == "query_features":
            return self.query_matrix, self.query_center, self.key_center
        return self.key_matrix, self.key_center, self.query_center

    def _center(self, center, x):
        return ops.cast(self.per_head(center, x), wide_dtype(x))

    def _transform(self, x, matrix, center):
        x = ops.cast(x, wide_dtype(x)) - self._center(center, x)
        return precise_einsum("...nh,nih->...ni", x, self.per_head(matrix, x))

    def get_config(self):
        inner = registry.serialize(self.inner)
        return {**super().get_config(), "feature_map": inner, "up_to": self.up_to}


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPDense(Conditioned):
    """FAVOR++ with an A for each direction, on conditioned queries and keys.

    `A` of OPRF becomes a matrix: after centring and balancing, diagonal in the
    eigenvectors of `E (x + y)(x + y)ᵀ`, each entry the optimum with d = 1. Before
    `keras_rfattn.calibrate` it is FAVOR++ with an A for each coordinate.

    Args:
        num_features: Number m of random vectors, 256 by default.
        statistics: As in `FavorPP`.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.
    """

    def __init__(
        self,
        num_features=None,
        statistics="auto",
        projection="orthogonal",
        seed=None,
        **kwargs,
    ):
        inner = FavorPP(
            num_features,
            statistics,
            per_direction=True,
            projection=projection,
            seed=seed,
        )
        super().__init__(inner, up_to="rotate", **kwargs)

    def get_config(self):
        config = self.inner.get_config()
        names = ("num_features", "statistics", "projection", "seed")
        own = keras.layers.Layer.get_config(self)
        return own | {name: config[name] for name in names}


def _through(a, samples):
    """Samples with `A q` for queries and `A⁻ᵀ k` for keys."""
    inverse = np.linalg.inv(a)
    return [(q @ a.swapaxes(-1, -2), k @ inverse) for q, k in samples]


def _shift(features, center, x):
    """Features times `exp(center · x)`."""
    factor = ops.sum(center * ops.cast(x, center.dtype), axis=-1, keepdims=True)
    return Features(features.values, features.log_scale + factor)
