"""Conditioning: softmax maps on queries and keys that are transformed to fit the data.

Centering and a linear transformation leave softmax attention unchanged, but can reduce
the variance of its estimate.
"""

import keras
import numpy as np
from keras import ops

import keras_rfattn.feature_maps.registry as registry
from keras_rfattn.arguments import check_choice
from keras_rfattn.backend import accumulated_matmul, precise_einsum, wide_dtype
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import FeatureMap, Sided, number
from keras_rfattn.feature_maps.favorpp import FavorPP
from keras_rfattn.feature_maps.moments import balance, mean_of, second_moments
from keras_rfattn.ops.features import Features

STEPS = ("center", "balance", "rotate")


def of_inner(name):
    """Returns a property of `MapOfMap` whose value the inner map has."""
    # `torch.compile` cannot trace an `operator.attrgetter`.
    return property(lambda self: getattr(self.inner, name))


class MapOfMap(Adaptive, FeatureMap):
    """Base of maps that compute a softmax map, `inner`, for transformed tokens."""

    is_causal_safe = of_inner("is_causal_safe")
    measures_sequence = of_inner("measures_sequence")
    is_unbiased = of_inner("is_unbiased")
    assumes_equal_lengths = of_inner("assumes_equal_lengths")
    num_features = of_inner("num_features")
    output_dim = of_inner("output_dim")
    features_per_scale = of_inner("features_per_scale")
    # A property whose value is the inner map's method.
    draw_again = of_inner("draw_again")

    def __init__(self, feature_map, seed=None, **kwargs):
        inner = registry.get(feature_map)
        if inner.kernel != "softmax":
            raise ValueError(
                "`feature_map` must estimate softmax attention, because "
                f"{type(self).__name__} is defined for no other kernel. Received: "
                f"feature_map={feature_map!r} with kernel {inner.kernel!r}."
            )
        super().__init__(seed=inner.seed if seed is None else seed, **kwargs)
        self.inner = inner.reseeded(self.seed)

    def build(self, input_shape):
        super().build(input_shape)
        self.inner.build(input_shape)

    def get_config(self):
        inner = registry.serialize(self.inner)
        return {**super().get_config(), "feature_map": inner}


@keras.saving.register_keras_serializable("keras_rfattn")
class Conditioned(Sided, MapOfMap):
    """Applies a softmax map to `A (q - c_q)` and `A⁻ᵀ (k - c_k)`.

    Here c_q and c_k are centers of queries and keys, and A is a matrix, for each head.
    Softmax attention does not depend on them, because
    `q·k = A(q - c_q) · A⁻ᵀ(k - c_k) + c_q·k + q·c_k - c_q·c_k`, and the map adds the
    last terms to the exponents. A random-feature estimate does depend on them: its
    variance grows with `exp(‖x + y‖²)`, where x and y are the transformed query and
    key. Conditioning does not change the weights of the model.

    It is related to dense-exponential random features (DERF; Likhosherstov et al.,
    "FAVOR#: Sharp Attention Kernel Approximations via New Classes of Positive Random
    Features", 2023), whose exponents have matrices that are chosen in closed form from
    second moments of queries and keys. There are two differences: queries and keys are
    centered first, and the matrices are applied before any estimator of softmax, not
    inside a specific one.

    Until `adapt` is called, queries and keys are not transformed. `adapt` performs
    these steps, up to and including the one that `up_to` names:

    - `"center"` sets c_q and c_k to the mean query and the mean key.
    - `"balance"` sets A so that both sides have equal covariances. A² is the geometric
      mean of the inverse query covariance and the key covariance.
    - `"rotate"` multiplies A by a rotation onto the eigenvectors of
      `E (x + y)(x + y)ᵀ`, for maps that treat each direction separately.

    Args:
        feature_map: A map of the softmax kernel, its registered name or its config.
            Defaults to `"favorpp"`.
        up_to: Last step of `adapt`: `"center"`, `"balance"` (default) or `"rotate"`.
        seed: Seed of the inner map. If `None`, the inner map keeps its own.

    Raises:
        ValueError: If the map estimates another kernel than softmax, or `up_to` is
            unknown.
    """

    is_symmetric = False
    # Whether training changes the matrices and centers.
    is_trained = False

    def __init__(self, feature_map="favorpp", up_to="balance", seed=None, **kwargs):
        super().__init__(feature_map, seed, **kwargs)
        check_choice("up_to", up_to, STEPS)
        self.up_to = up_to

    @property
    def has_exponents(self):
        # `exponents` folds A into the inner map's vectors. An inner `Conditioned` map
        # returns vectors for tokens that it has centered itself.
        return self.inner.has_exponents and not isinstance(self.inner, Conditioned)

    is_positive = of_inner("is_positive")
    # Properties whose values are methods of the inner map.
    sign = of_inner("sign")
    log_moment = of_inner("log_moment")
    relative_covariance = of_inner("relative_covariance")

    def build(self, input_shape):
        super().build(input_shape)
        heads, dim = self.num_heads, self.head_dim
        identity = np.broadcast_to(np.eye(dim, dtype="float32"), (heads, dim, dim))
        add = self.add_trained if self.is_trained else self.add_fixed
        self.query_matrix = add("query_matrix", identity)
        self.key_matrix = add("key_matrix", identity)
        self.query_center = add("query_center", "zeros", (heads, dim))
        self.key_center = add("key_center", "zeros", (heads, dim))

    def before_projection(self, query, key, head=0):
        moved = []
        for x, is_key in ((query, False), (key, True)):
            matrix, center, _ = self._side(is_key)
            moved.append((x - number(center, head)) @ number(matrix, head).T)
        return self.inner.before_projection(*moved, head)

    def fit(self, samples):
        c_q, c_k = mean_of(lambda q, k: np.stack([q.mean(1), k.mean(1)]), samples)
        samples = [(q - c_q[:, None], k - c_k[:, None]) for q, k in samples]
        a = np.broadcast_to(np.eye(self.head_dim), self.query_matrix.shape)
        if self.up_to != "center":
            a = balance(*second_moments(samples))
        if self.up_to == "rotate":
            a = self._rotation(_through(a, samples)).swapaxes(-1, -2) @ a
        samples = _through(a, samples)
        self.query_matrix.assign(a)
        self.key_matrix.assign(np.linalg.inv(a).swapaxes(-1, -2))
        self.query_center.assign(c_q)
        self.key_center.assign(c_k)
        if self.inner.is_adaptive:
            self.inner.adapt(samples)

    def _rotation(self, samples):
        """Returns the eigenvectors of `E (x + y)(x + y)ᵀ` over pairs, as columns."""

        def cross(q, k):
            product = np.einsum("kh,ki->khi", q.mean(1), k.mean(1))
            return product + product.swapaxes(-1, -2)

        total = second_moments(samples).sum(0) + mean_of(cross, samples)
        return np.linalg.eigh(total)[1]

    def statistics(self, query, key, *args, **kwargs):
        query, key = self._transform(query, False), self._transform(key, True)
        return self.inner.statistics(query, key, *args, **kwargs)

    def _features(self, x, stats, is_key):
        inner = self.inner.key_features if is_key else self.inner.query_features
        features = inner(self._transform(x, is_key), stats)
        _, center, other = self._side(is_key)
        x = x if is_key else x - self.per_head(center, x)
        # The features are multiplied by `exp(other · x)`.
        factor = ops.sum(self.per_head(other, x) * x, axis=-1, keepdims=True)
        return Features(features.values, features.log_scale + factor)

    def exponents(self, method, x, stats=None):
        is_key = method == "key_features"
        matrix, center, other = self._side(is_key)
        x = x - self.per_head(center, x)
        found = self.inner.exponents(method, x, stats)
        # The matrix and the center are folded into the random vectors, because there
        # are fewer vectors than tokens.
        matrix, center, other = (
            ops.expand_dims(ops.cast(y, x.dtype), 0) for y in (matrix, center, other)
        )
        vectors = accumulated_matmul(
            matrix, found.vectors, transpose_a=True, is_precise=True
        )
        bias = found.bias
        if is_key:
            constant = ops.sum(center * other, axis=-1)
            bias = ops.cast(bias, x.dtype) + ops.expand_dims(constant, (-2, -1))
        return found._replace(vectors=vectors + ops.expand_dims(other, -1), bias=bias)

    def common_exponent(self, method, x, stats=None):
        matrix = ops.cast(self._side(method == "key_features")[0], x.dtype)
        inner = accumulated_matmul(x, matrix, transpose_b=True, is_precise=True)
        return self.inner.common_exponent(method, inner, stats)

    def _side(self, is_key):
        """Returns the matrix and center of a side, and the center of the other side."""
        if is_key:
            return self.key_matrix, self.key_center, self.query_center
        return self.query_matrix, self.query_center, self.key_center

    def _transform(self, x, is_key):
        matrix, center, _ = self._side(is_key)
        x = ops.cast(x, wide_dtype(x))
        x = x - self.per_head(center, x)
        return precise_einsum("...nh,nih->...ni", x, self.per_head(matrix, x))

    def get_config(self):
        return {**super().get_config(), "up_to": self.up_to}


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPDense(Conditioned):
    """FAVOR++ with a separate A for each direction, on conditioned queries and keys.

    The number A of FAVOR++ becomes a matrix. After queries and keys are centered and
    balanced (see `Conditioned`), this matrix is diagonal in the basis of eigenvectors
    of `E (x + y)(x + y)ᵀ`, and each entry is the optimum with d = 1. Before
    `keras_rfattn.calibrate`, the map is FAVOR++ with a separate A for each coordinate.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        statistics: Where the statistic that decides A comes from: `"batch"` (the
            current sequence), `"stored"` (a moving average) or `"auto"` (default), as
            `FavorPP` describes.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `statistics` or
            `projection` is unknown.

    Reference:
        Likhosherstov et al., "Chefs' Random Tables" (2022), equation 7, in each
        direction.
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
    """Transforms samples to `A q` for queries and `A⁻ᵀ k` for keys."""
    inverse = np.linalg.inv(a)
    return [(q @ a.swapaxes(-1, -2), k @ inverse) for q, k in samples]
