"""The exponential map `exp(V z + b + c(x))`: FAVOR+, FAVOR++ and their learned kin."""

import functools
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

precise_matmul = functools.partial(accumulated_matmul, is_precise=True)


@keras.saving.register_keras_serializable("keras_rfattn")
class Exponential(Adaptive, ProjectedFeatureMap):
    """Features `exp(Vᵀz + b/2 - ‖z‖²/2 + ν·(x - μ/2)) / √m`, with `z = M (x - μ)`.

    Here x is a query or a key, M and μ belong to its side, and ν is the μ of the other
    side. The weights, for K key/value heads, are:

    - `vectors` V `(K, 2, H, m)`: the columns are the features' vectors, of queries and
      of keys; `(K, 1, H, m)`, the same for both, unless the map trains.
    - `bias` b `(K, m)`: the logarithm of each feature's weight.
    - `centers` μ `(K, 2, H)` and `matrices` M `(K, 2, H, H)`, of queries and of keys,
      which condition the tokens, if `is_conditioned`. Otherwise M is 1 and μ is 0.

    Theorem. Let V be `√(1 - 4A) w` for Gaussian vectors w and a diagonal A <= 0, the
    same on both sides, let `b = 2 wᵀA w + ½ log det(1 - 4A)`, and let `M_q = M_k⁻ᵀ`.
    Then products of query and key features average to the softmax kernel `exp(q · k)`
    ("Chefs' Random Tables", 2022, theorem 3.1, and
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

    There are three differences. Exponents are returned, not applied, so that nothing
    overflows. The scale of attention, M, μ and ν are folded into one matrix and one
    bias a side, once a call. Attention leaves out the exponent that all features of a
    query share, because it cancels.

    A subclass chooses a fit, from `fits.py` or of its own, that sets the weights: at
    first from random vectors alone, and in `calibrate` from queries and keys.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; m is `num_features`.

    Examples:
        >>> feature_map = keras_rfattn.feature_maps.FavorPlus(num_features=32, seed=0)
        >>> feature_map.build((None, None, 2, 8))
        >>> tuple(feature_map.vectors.shape)
        (2, 1, 8, 32)
    """

    has_exponents = True
    # The function in `fits.py` that sets the weights.
    fitted = staticmethod(fits.favorplus)
    # Whether the weights train, with separate vectors for queries and keys.
    trains = False
    # Whether the fit sets centers and matrices.
    is_conditioned = False
    # The function in `fits.py` from mean squares to A, for a map that measures the
    # sequence at hand while it is not calibrated.
    best_a = None

    measures_sequence = property(lambda self: self.best_a is not None)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if {"query_features", "key_features"} & set(vars(cls)):
            cls.has_exponents = False  # `bind` would not call them.

    def add_vectors(self):
        add = self.add_trained if self.trains else self.add_fixed
        for name, value in self._stacked(self.fitted(self.random_vectors(0))):
            setattr(self, name, add(name, np.array(value, "float32")))

    def random_vectors(self, draw):
        """Returns draw number `draw` of the vectors w, a NumPy array `(K, H, m)`."""
        shape = self.num_heads, self.head_dim, self.num_features
        return self.initializer(draw).draw(shape)

    def _stacked(self, fit):
        """Yields the weights of a fit, with vectors of one or of both sides."""
        sides = 2 if self.trains else 1
        for name, value in fit.items():
            yield name, np.stack([value] * sides, 1) if name == "vectors" else value

    def _assign(self, fit):
        for name, value in self._stacked(fit):
            getattr(self, name).assign(value)

    def fit(self, samples):
        self._assign(self.fitted(self.random_vectors(integer(self.draws)), samples))

    def assign_vectors(self, draw):
        # A is kept, and conditioning with it.
        fit = fits.oprf(self.random_vectors(draw), self.a()[:, 0])
        self._assign({name: as_numpy(x) for name, x in fit.items()})

    def a(self):
        """Returns A of each side and direction, a NumPy array `(K, 1 or 2, H)`."""
        draws = self.random_vectors(integer(self.draws))[:, None]
        return fits.a_of(as_numpy(self.vectors.value), draws)

    def query_features(self, x):
        return self._fold((1.0, x.dtype), self._values())[0]._replace(x=x)

    def key_features(self, x):
        return self._fold((1.0, x.dtype), self._values())[1]._replace(x=x)

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        if not self.has_exponents:
            return super().bind(query, key, side, query_mask, key_mask, causal)
        settings, weights = (side, wide_dtype(query, key)), self._values()
        if self.measures_sequence and not causal:
            is_stored = ops.convert_to_tensor(self.updates) > 0
            if not known_true(is_stored):
                z = fits.mean_square_of_rows(query, key, query_mask, key_mask)
                a = self.best_a(side**2 * z)
                folded = self._fold(settings, weights, a, is_stored)
                return BoundExponential(self, side, folded, a)
        return BoundExponential(self, side, kept(self, settings, weights, self._fold))

    def _values(self):
        conditioning = (self.centers, self.matrices) if self.is_conditioned else ()
        return [x.value for x in (self.vectors, self.bias, *conditioning)]

    def _fold(self, settings, weights, a=None, is_stored=True):
        """Returns the `Exponents` of queries and of keys, without tokens."""
        side, dtype = settings
        vectors, bias, *conditioning = (ops.cast(x, dtype)[None] for x in weights)
        if a is not None:
            rows = fits.oprf(vectors[0, :, 0], a)
            vectors = ops.where(is_stored, vectors, rows["vectors"][:, :, None])
            bias = ops.where(is_stored, bias, rows["bias"])
        bias = bias[:, :, None, None] - math.log(self.output_dim)
        if not conditioning:
            matrix, bias = side * vectors, bias[:, :, 0] / 2
            form = Form(ops.full((1, 1, 1, 1), side, dtype))
            return [Exponents(None, matrix[:, :, i], bias, form) for i in (0, -1)]
        # `Vᵀz + ν·(x - μ/2)` is `x · (MᵀV + ν) - μ · (MᵀV + ν/2)`.
        centers, matrices = conditioning
        products = precise_matmul(matrices, vectors, transpose_a=True)
        linear = products + ops.flip(centers, axis=2)[..., None]
        row = -centers[..., None, :]
        bias = bias + precise_matmul(row, products + linear)
        offset = precise_matmul(row, matrices, transpose_b=True)
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
        if self.trains:
            return None
        return functools.partial(log_moment_per_direction, a=self.a()[head, 0])


class BoundExponential(Bound):
    """An `Exponential` whose weights are `folded` for one call, as `Exponents`."""

    def __init__(self, feature_map, side, folded, a=None):
        super().__init__(feature_map, side)
        self.folded, self.measured_a = folded, a

    def query_features(self, x):
        return self.folded[0]._replace(x=x)

    def key_features(self, x):
        return self.folded[1]._replace(x=x)

    def log_moment(self, head=0):
        if self.measured_a is None or self.feature_map.is_calibrated:
            return self.feature_map.log_moment(head)
        a = as_numpy(self.measured_a)[:, head].mean(axis=0)
        return functools.partial(log_moment_per_direction, a=a)


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
    best_a = staticmethod(fits.best_a_of_head)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPDense(Exponential):
    """FAVOR++ with an A of each direction: `Exponential` by `fits.dense`.

    While it is not calibrated, it measures each sequence as `FavorPP` does.
    """

    fitted = staticmethod(fits.dense)
    is_conditioned = True
    is_symmetric = False
    best_a = staticmethod(fits.best_a_of_directions)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPLearned(Exponential):
    """The default map: `Exponential` by `fits.dense`, whose weights then train.

    Before calibration it equals FAVOR+. `uptrain` calibrates it and trains it.
    """

    fitted = staticmethod(fits.dense)
    trains = True
    is_conditioned = True
    is_symmetric = False
    is_unbiased = False
