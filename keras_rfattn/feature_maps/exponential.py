"""The exponential map `exp(V z + b + c(x))`: FAVOR+, FAVOR++ and their learned kin."""

import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import accumulated_matmul, known_true, wide_dtype
from keras_rfattn.feature_maps import fits
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import Bound, number
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.trained import as_numpy, integer
from keras_rfattn.kernels.variance import log_moment_per_direction
from keras_rfattn.ops.exponents import Exponents, Form

CONDITIONING = ("query_center", "key_center", "query_matrix", "key_matrix")


@keras.saving.register_keras_serializable("keras_rfattn")
class Exponential(Adaptive, ProjectedFeatureMap):
    """Features `exp(V z + b/2 - ‖z‖²/2 + ν·x) / √m` of the conditioned `z = M (x - μ)`.

    Theorem. Let the rows of V be `√(1 - 4A) w` with Gaussian w and a diagonal A <= 0,
    the same for queries and keys, let `b = 2 wᵀA w + ½ log det(1 - 4A)`, and let
    `M_q = M_k⁻ᵀ`. Then the products of query and key features average to the softmax
    kernel `exp(q · k)`, for every A, M and μ ("Chefs' Random Tables", theorem 3.1, and
    `q·k = z_q·z_k + μ_k·q + μ_q·k - μ_q·μ_k`). A, M and μ change only the variance.

    The map equals this function of one head's queries and keys, scaled, `(n, H)`:

        def features(q, k, V_q, V_k, b, M_q, M_k, mu_q, mu_k):
            def side(x, V, M, mu, other):
                z = (x - mu) @ M.T
                common = x @ other - mu @ other / 2 - (z * z).sum(-1) / 2
                return z @ V + (b - np.log(len(b))) / 2 + common[:, None]

            log_q = side(q, V_q, M_q, mu_q, mu_k)
            log_k = side(k, V_k, M_k, mu_k, mu_q)
            return np.exp(log_q), np.exp(log_k)

        phi_q, phi_k = features(...)
        attention = phi_q @ (phi_k.T @ v) / (phi_q @ phi_k.sum(0))[:, None]

    There are four differences from it. The exponents are returned, not applied, so that
    nothing overflows. The scale of attention, M, μ and ν are folded into one matrix and
    one bias a side, once a call. Attention leaves out the common exponent of a query,
    which cancels. Without conditioning (`is_conditioned`), M is 1 and μ is 0.

    Its weights, for K key/value heads, are `vectors` V `(K, H, m)` or, if they train,
    separate `query_vectors` and `key_vectors`; `bias` b `(K, m)`, the logarithm of each
    feature's weight; and, if the map is conditioned, `query_center` and `key_center` μ
    `(K, H)`, and `query_matrix` and `key_matrix` M `(K, H, H)`.

    A subclass chooses the fit, a function in `fits.py` or of your own, that sets the
    weights: at first from random vectors alone, then, by `keras_rfattn.calibrate`, from
    samples of queries and keys.

    Args:
        num_features: Number m of features, twice the head dim by default.
        projection: How random vectors are drawn: `"orthogonal"` (default),
            `"gaussian"` or a `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `projection` is
            unknown.

    Examples:
        >>> from keras_rfattn import feature_maps, layers
        >>> feature_map = feature_maps.FavorPlus(num_features=32, seed=0)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 32)
    """

    has_exponents = True
    # The function in `fits.py` that sets the weights.
    fitted = staticmethod(fits.favorplus)
    # Whether the weights train, with separate vectors for queries and keys.
    trains = False
    # Whether the fit sets centers and matrices.
    is_conditioned = False
    # The number of coordinates that share one A, for a map that measures the sequence
    # at hand while it is not calibrated; `None` for the head dim.
    directions = None

    def add_vectors(self):
        weights = self.fitted(self.random_vectors(0))
        add = self.add_trained if self.trains else self.add_fixed
        names = ("query_vectors", "key_vectors") if self.trains else ("vectors",)
        for name in names:
            setattr(self, name, add(name, np.array(weights["vectors"], "float32")))
        for name in ("bias", *(CONDITIONING if self.is_conditioned else ())):
            setattr(self, name, add(name, np.array(weights[name], "float32")))

    def random_vectors(self, draw):
        """Returns draw number `draw` of the vectors w, a NumPy array `(K, H, m)`."""
        shape = self.num_heads, self.head_dim, self.num_features
        return as_numpy(self.initializer(draw)(shape))

    def sides(self):
        """Returns the variables of the vectors of queries and of keys."""
        if self.trains:
            return self.query_vectors, self.key_vectors
        return self.vectors, self.vectors

    def _set(self, weights):
        for side in self.sides():
            side.assign(weights["vectors"])
        for name in weights.keys() - {"vectors"}:
            getattr(self, name).assign(weights[name])

    def fit(self, samples):
        self._set(self.fitted(self.random_vectors(integer(self.draws)), samples))

    def assign_vectors(self, draw):
        # A is kept, and conditioning with it.
        self._set(fits.oprf(self.random_vectors(draw), self.a()))

    def a(self, vectors=None):
        """Returns A of each head and direction, a NumPy array `(..., K, H)`."""
        vectors = as_numpy(self.sides()[0].value) if vectors is None else vectors
        return fits.a_of(vectors, self.random_vectors(integer(self.draws)))

    def query_features(self, x):
        return self._folded(1.0, x.dtype)[0]._replace(x=x)

    def key_features(self, x):
        return self._folded(1.0, x.dtype)[1]._replace(x=x)

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        dtype, measured = wide_dtype(query, key), None
        if self.measures_sequence and not causal:
            is_stored = ops.convert_to_tensor(self.updates) > 0
            if not known_true(is_stored):
                z = fits.mean_square_of_rows(query, key, query_mask, key_mask)
                measured = self._measured(z * side**2, is_stored)
        return BoundExponential(self, side, self._folded(side, dtype, measured))

    def _measured(self, z, is_stored):
        """Returns vectors and bias for the mean square z of each row `(B, K, H)`."""
        if self.directions is None:
            z = ops.sum(z, axis=-1, keepdims=True)
        a = fits.best_a(z, self.directions or self.head_dim)
        stored = {"vectors": self.vectors, "bias": self.bias}
        weights = fits.oprf(self.vectors, a)
        return {x: ops.where(is_stored, stored[x], weights[x]) for x in stored}

    def _folded(self, side, dtype, measured=None):
        """Returns the `Exponents` of queries and of keys, without tokens."""

        def array(weight):
            weight = ops.cast(ops.convert_to_tensor(weight), dtype)
            return ops.expand_dims(weight, 0)

        if measured is None:
            vectors, bias = [array(x) for x in self.sides()], array(self.bias)
        else:
            vectors = [ops.cast(measured["vectors"], dtype)] * 2
            bias = ops.cast(measured["bias"], dtype)
        bias = ops.expand_dims((bias - math.log(self.output_dim)) / 2, -2)
        if not self.is_conditioned:
            form = Form(ops.full((1, 1, 1, 1), side, dtype))
            return [Exponents(None, side * x, bias, form) for x in vectors]
        conditioning = [array(getattr(self, name)) for name in CONDITIONING]
        centers, matrices = conditioning[:2], conditioning[2:]
        sides = zip(vectors, matrices, centers, centers[::-1], strict=True)
        return [_fold(side, bias, *weights) for weights in sides]

    def before_projection(self, query, key, head=0):
        if not self.is_conditioned:
            return query, key
        c_q, c_k, m_q, m_k = (number(getattr(self, x), head) for x in CONDITIONING)
        return (query - c_q) @ m_q.T, (key - c_k) @ m_k.T

    def log_moment(self, head=0, vectors=None):
        if self.trains:
            return None
        a = self.a(vectors)
        a = a.reshape(-1, *a.shape[-2:])[:, head].mean(axis=0).astype("float64")
        return lambda x, y: log_moment_per_direction(x, y, a)

    def status(self, causal):
        if not self.is_calibrated and self.measures_sequence and causal is False:
            return "statistics per sequence"
        return super().status(causal)


class BoundExponential(Bound):
    """An `Exponential` map whose weights are folded for one call."""

    def __init__(self, feature_map, side, folded):
        super().__init__(feature_map, side)
        self.query, self.key = folded

    def query_features(self, x):
        return self.query._replace(x=x)

    def key_features(self, x):
        return self.key._replace(x=x)

    def log_moment(self, head=0):
        """Returns `FeatureMap.log_moment` for the weights of this call."""
        vectors = None
        if self.feature_map.measures_sequence:
            vectors = as_numpy(self.query.matrix) / self.side
        return self.feature_map.log_moment(head, vectors)


def _fold(side, bias, vectors, matrix, center, other):
    """Returns the `Exponents` of one side, without tokens, from weights `(1, K, ...)`.

    `V z + ν·(x - μ/2)` is `x · (MᵀV + ν) - μ · (MᵀV + ν/2)`.
    """
    matrix = ops.swapaxes(matrix, -1, -2)
    center, other = ops.expand_dims(center, -2), ops.expand_dims(other, -1)
    products = accumulated_matmul(matrix, vectors, is_precise=True)
    constant = accumulated_matmul(center, products + other / 2, is_precise=True)
    offset = accumulated_matmul(center, matrix, is_precise=True)
    form = Form(side * matrix, -offset)
    return Exponents(None, side * (products + other), bias - constant, form)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPlus(Exponential):
    """FAVOR+: `Exponential` by `fits.favorplus`, `exp(w·x - ‖x‖²/2) / √m`."""

    is_adaptive = False
    is_generalized_exponential = True


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPP(Exponential):
    """FAVOR++: `Exponential` by `fits.favorpp`, with one A of each head.

    While it is not calibrated, each sequence of bidirectional self-attention gets its
    own A, as in the paper; causal attention uses A = 0, which is FAVOR+.
    """

    fitted = staticmethod(fits.favorpp)
    is_generalized_exponential = True
    measures_sequence = True


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPDense(Exponential):
    """FAVOR++ with an A of each direction: `Exponential` by `fits.dense`.

    While it is not calibrated, each sequence of bidirectional self-attention gets its
    own A of each coordinate; causal attention uses A = 0, which is FAVOR+.
    """

    fitted = staticmethod(fits.dense)
    is_conditioned = True
    is_symmetric = False
    measures_sequence = True
    directions = 1


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPLearned(Exponential):
    """The default map: `Exponential` by `fits.dense`, whose weights then train.

    Before training it equals `FavorPPDense`, and before calibration FAVOR+. It is made
    for `keras_rfattn.uptrain`, whose stage "calibrate" fits it and whose later stages
    train all of its weights.
    """

    fitted = staticmethod(fits.dense)
    trains = True
    is_conditioned = True
    is_symmetric = False
    is_unbiased = False
