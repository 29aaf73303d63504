"""The exponential map `exp(V z + b + c(x))`: FAVOR+, FAVOR++ and their learned kin."""

import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import accumulated_matmul, kept, known_true, wide_dtype
from keras_rfattn.feature_maps import fits
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import Bound, number
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.weights import as_numpy, integer
from keras_rfattn.kernels.variance import log_moment_per_direction
from keras_rfattn.ops.exponents import Exponents, Form


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

    Its weights, for K key/value heads: `vectors` V `(K, 2, H, m)`, of queries and of
    keys (`(K, 1, H, m)`, the same for both, unless they train); `bias` b `(K, m)`, the
    logarithm of each feature's weight; and, if the map is conditioned, `centers` μ
    `(K, 2, H)` and `matrices` M `(K, 2, H, H)`, of queries and of keys.

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

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if {"query_features", "key_features"} & set(vars(cls)):
            # `bind` knows only the features of this class.
            cls.has_exponents = False

    def add_vectors(self):
        weights = self._weights(self.fitted(self.random_vectors(0)))
        add = self.add_trained if self.trains else self.add_fixed
        for name, value in weights.items():
            setattr(self, name, add(name, np.array(value, "float32")))

    def random_vectors(self, draw):
        """Returns draw number `draw` of the vectors w, a NumPy array `(K, H, m)`."""
        shape = self.num_heads, self.head_dim, self.num_features
        return self.initializer(draw).draw(shape)

    def _weights(self, fit):
        """Returns the result of a fit with vectors of one or of both sides."""
        copies = 2 if self.trains else 1
        return {**fit, "vectors": np.stack([fit["vectors"]] * copies, axis=1)}

    def fit(self, samples):
        draws = self.random_vectors(integer(self.draws))
        for name, value in self._weights(self.fitted(draws, samples)).items():
            getattr(self, name).assign(value)

    def assign_vectors(self, draw):
        # A is kept, and conditioning with it.
        weights = fits.oprf(self.random_vectors(draw), self.a()[:, 0])
        weights = {name: as_numpy(x) for name, x in weights.items()}
        for name, value in self._weights(weights).items():
            getattr(self, name).assign(value)

    def a(self):
        """Returns A of each side and direction, a NumPy array `(K, 1 or 2, H)`."""
        draws = self.random_vectors(integer(self.draws))[:, None]
        return fits.a_of(as_numpy(self.vectors.value), draws)

    def query_features(self, x):
        queries, _ = self._fold((1.0, x.dtype), self._values())
        return queries._replace(x=x)

    def key_features(self, x):
        _, keys = self._fold((1.0, x.dtype), self._values())
        return keys._replace(x=x)

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        if not self.has_exponents:
            return super().bind(query, key, side, query_mask, key_mask, causal)
        settings, weights = (side, wide_dtype(query, key)), self._values()
        if self.measures_sequence and not causal:
            is_stored = ops.convert_to_tensor(self.updates) > 0
            if not known_true(is_stored):
                z = fits.mean_square_of_rows(query, key, query_mask, key_mask)
                a = self._best_a(side**2 * z)
                folded = self._fold(settings, weights, a, is_stored)
                return BoundExponential(self, side, folded, a)
        return BoundExponential(self, side, kept(self, settings, weights, self._fold))

    def _values(self):
        """Returns the values of the weights that `_fold` takes."""
        weights = self.vectors, self.bias
        if self.is_conditioned:
            weights += self.centers, self.matrices
        return [x.value for x in weights]

    def _best_a(self, z):
        """Returns A `(B, K, 1 or H)` for the mean squares z of rows, `(B, K, H)`."""
        if self.directions is None:
            z = ops.sum(z, axis=-1, keepdims=True)
        return fits.best_a(z, self.directions or self.head_dim)

    def _fold(self, settings, weights, a=None, is_stored=True):
        """Returns the `Exponents` of queries and of keys, without tokens.

        `V z + ν·(x - μ/2)` is `x · (MᵀV + ν) - μ · (MᵀV + ν/2)`.
        """
        side, dtype = settings
        vectors, bias, *conditioning = (ops.cast(x, dtype)[None] for x in weights)
        if a is not None:
            rows = fits.oprf(vectors[0, :, 0], a)
            vectors = ops.where(is_stored, vectors, rows["vectors"][:, :, None])
            bias = ops.where(is_stored, bias, rows["bias"])
        bias = bias[:, :, None, None] - math.log(self.output_dim)
        if not conditioning:
            matrix, bias = side * vectors, bias / 2
            form = Form(ops.full((1, 1, 1, 1), side, dtype))
            return [
                Exponents(None, matrix[:, :, i], bias[:, :, 0], form) for i in (0, -1)
            ]
        centers, matrices = conditioning
        products = accumulated_matmul(
            matrices, vectors, transpose_a=True, is_precise=True
        )
        linear = products + ops.flip(centers, axis=2)[..., None]
        row = -centers[..., None, :]
        bias = bias + accumulated_matmul(row, products + linear, is_precise=True)
        offset = accumulated_matmul(row, matrices, transpose_b=True, is_precise=True)
        arrays = side * linear, bias / 2, side * ops.swapaxes(matrices, -1, -2), offset
        sides = [[x[:, :, i] for x in arrays] for i in (0, 1)]
        return [Exponents(None, x, y, Form(*form)) for x, y, *form in sides]

    def before_projection(self, query, key, head=0):
        if not self.is_conditioned:
            return query, key
        centers, matrices = number(self.centers, head), number(self.matrices, head)
        query, key = query - centers[0], key - centers[1]
        return query @ matrices[0].T, key @ matrices[1].T

    def log_moment(self, head=0):
        return None if self.trains else _log_moment(self.a()[head, 0])

    def status(self, causal):
        if not self.is_calibrated and self.measures_sequence and causal is False:
            return "statistics per sequence"
        return super().status(causal)


class BoundExponential(Bound):
    """An `Exponential` map whose weights are folded for one call.

    Args:
        feature_map: A built `Exponential`.
        side: Number by which tokens are multiplied.
        folded: The `Exponents` of queries and of keys, without tokens.
        a: A of each row `(B, K, 1 or H)`, if it was measured, or `None`.
    """

    def __init__(self, feature_map, side, folded, a=None):
        super().__init__(feature_map, side)
        self.folded, self.measured_a = folded, a

    def query_features(self, x):
        """Returns the `Exponents` of queries `(B, T, N, H)`, not scaled."""
        return self.folded[0]._replace(x=x)

    def key_features(self, x):
        """Returns the `Exponents` of keys `(B, S, K, H)`, not scaled."""
        return self.folded[1]._replace(x=x)

    def log_moment(self, head=0):
        """Returns `FeatureMap.log_moment` for the weights of this call."""
        if self.measured_a is None or self.feature_map.is_calibrated:
            return self.feature_map.log_moment(head)
        return _log_moment(as_numpy(self.measured_a)[:, head].mean(axis=0))


def _log_moment(a):
    a = a.astype("float64")
    return lambda x, y: log_moment_per_direction(x, y, np.broadcast_to(a, x.shape[-1:]))


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
