"""The exponential map `exp(V x + b + c(x))`: FAVOR+, FAVOR++ and their learned kin."""

import functools
import math

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import accumulated_matmul, kept, known_true, wide_dtype
from keras_rfattn.feature_maps import fits
from keras_rfattn.feature_maps.base import Bound, number
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.weights import Adaptive, NotPositive, as_numpy, integer
from keras_rfattn.kernels.variance import log_moment_per_direction
from keras_rfattn.ops.exponents import Exponents, Form

precise_matmul = functools.partial(accumulated_matmul, is_precise=True)


@keras.saving.register_keras_serializable("keras_rfattn")
class Exponential(Adaptive, ProjectedFeatureMap):
    """Features `exp((B w)ᵀz + c + b/2 - ‖z‖²/2 + ν·(x - μ/2)) / √m`, `z = M (x - μ)`.

    Here x is a query or a key, scaled, M and μ belong to its side, and ν is the other
    side's μ; `B = √(1 - 4A)` and `c = wᵀA w + ¼ log det(1 - 4A)`, with a diagonal A.
    The weights, for K key/value heads, are:

    - `vectors`: column j is the vector w of feature j. `(K, 1, H, m)`, shared by both
      sides; `(K, 2, H, m)`, of queries, then of keys, if the map `trains`.
    - `a`: A <= 0 of the head, `(K, 1)`, or of each direction, `(K, H)`.
    - `bias` b `(K, m)`: the log-weight of each feature in the sum over features, half
      of it for each side; 0 in the fits of `fits.py`, until it trains.
    - `centers` μ `(K, 2, H)` and `matrices` M `(K, 2, H, H)`, of queries, then of keys,
      if `is_conditioned`; otherwise μ is 0 and M is 1.

    Theorem. Let each w be N(0, I) and the same on both sides, let b be 0, and let
    `M_q = M_k⁻ᵀ`. Then products of query and key features average to the softmax
    kernel `exp(q · k)`, and A, M and μ change only the variance. This follows from
    "Chefs' Random Tables" (2022), theorem 3.1, and from
    `q·k = z_q·z_k + μ_k·q + μ_q·k - μ_q·μ_k`.

    The map equals this function of one head's scaled q and k `(n, H)`, with A `(H,)`:

        def features(q, k, w_q, w_k, A, b, M_q, M_k, mu_q, mu_k):
            def side(x, w, M, mu, other):
                z = (x - mu) @ M.T
                c = A @ w**2 + np.log(1 - 4 * A).sum() / 4
                common = x @ other - mu @ other / 2 - (z * z).sum(-1) / 2
                exponent = z @ (np.sqrt(1 - 4 * A)[:, None] * w) + c
                return exponent + (b - np.log(len(b))) / 2 + common[:, None]

            log_q = side(q, w_q, M_q, mu_q, mu_k)
            log_k = side(k, w_k, M_k, mu_k, mu_q)
            return np.exp(log_q), np.exp(log_k)

        phi_q, phi_k = features(...)
        attention = phi_q @ (phi_k.T @ v) / (phi_q @ phi_k.sum(0))[:, None]

    There are three differences. Exponents are returned, not applied, so that nothing
    overflows. A, M, μ, ν and the scale of attention are folded once a call: per side,
    into a matrix, a bias, and a `Form` for `-‖z‖²/2`. Attention leaves that term of
    a query out, because it cancels.

    A subclass chooses a fit, from `fits.py` or of its own, that sets the weights: at
    first from random vectors alone, and in `calibrate` from samples of tokens too.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; m is `num_features`.
    """

    has_exponents = True
    # The function in `fits.py` that sets the weights.
    fitted = staticmethod(fits.favorplus)
    # Whether all weights train, with separate vectors for queries and keys.
    trains = False
    is_conditioned = False  # Whether the fit sets centers and matrices.
    # The function in `fits.py` from the mean square of q + k to A, for a map that
    # measures the sequence at hand while it is not calibrated.
    best_a = None

    measures_sequence = property(lambda self: self.best_a is not None)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if {"query_features", "key_features"} & set(vars(cls)):
            cls.has_exponents = False  # `bind` would not call the methods.

    def add_vectors(self):
        add = self.add_trained if self.trains else self.add_fixed
        # From A = 1/8 on, the variance is infinite.
        limits = {"a": {"constraint": NotPositive()}} if self.trains else {}
        for name, value in self._stacked(self.fitted(self.random_vectors(0))):
            value = np.array(value, "float32")
            setattr(self, name, add(name, value, **limits.get(name, {})))

    def random_vectors(self, draw):
        """Returns draw number `draw` of the vectors w, a NumPy array `(K, H, m)`."""
        shape = self.num_heads, self.head_dim, self.num_features
        return self.initializer(draw).draw(shape)

    def _stacked(self, fit):
        """Yields the weights of a fit, with vectors of one or of both sides."""
        sides = 2 if self.trains else 1
        for name, value in fit.items():
            yield name, np.stack([value] * sides, 1) if name == "vectors" else value

    def fit(self, samples):
        fit = self.fitted(self.random_vectors(integer(self.draws)), samples)
        for name, value in self._stacked(fit):
            getattr(self, name).assign(value)

    def assign_vectors(self, draw):
        ((_, value),) = self._stacked({"vectors": self.random_vectors(draw)})
        self.vectors.assign(value)

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
                squares = fits.mean_square_of_rows(query, key, query_mask, key_mask)
                measured = self.best_a(side**2 * squares)
                weights[1] = ops.where(is_stored, weights[1], measured)
                folded = self._fold(settings, weights)
                return BoundExponential(self, side, folded, weights[1])
        return BoundExponential(self, side, kept(self, settings, weights, self._fold))

    def _values(self):
        conditioning = (self.centers, self.matrices) if self.is_conditioned else ()
        weights = self.vectors, self.a, self.bias, *conditioning
        return [x.value[None] for x in weights]

    def _fold(self, settings, weights):
        """Returns the `Exponents` of queries and of keys, without tokens."""
        side, dtype = settings
        vectors, a, bias, *conditioning = (ops.cast(x, dtype) for x in weights)
        a = a[:, :, None, :, None]
        bias = bias[:, :, None, None] - math.log(self.output_dim)
        bias = bias + 2 * fits.constant(vectors, a)
        vectors = ops.sqrt(1 - 4 * a) * vectors
        if not conditioning:
            form = Form(ops.full((1, 1, 1, 1), side, dtype))
            sides = [(side * vectors[:, :, i], bias[:, :, i] / 2) for i in (0, -1)]
            return [Exponents(None, *x, form) for x in sides]
        # With V = B w, `Vᵀz + ν·(x - μ/2)` is `x · (MᵀV + ν) - μ · (MᵀV + ν/2)`.
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
        return BoundExponential(self, 1.0, None).log_moment(head)


class BoundExponential(Bound):
    """An `Exponential` whose weights are `folded` for one call, as `Exponents`."""

    def __init__(self, feature_map, side, folded, a=None):
        super().__init__(feature_map, side)
        self.folded, self.a = folded, feature_map.a if a is None else a

    def query_features(self, x):
        return self.folded[0]._replace(x=x)

    def key_features(self, x):
        return self.folded[1]._replace(x=x)

    def log_moment(self, head=0):
        if self.feature_map.trains:
            return None
        a = as_numpy(ops.convert_to_tensor(self.a))
        a = a.reshape(-1, *a.shape[-2:])[:, head].mean(axis=0)
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
    own A (CRT); causal and cross-attention use A = 0, which is FAVOR+.
    """

    fitted = staticmethod(fits.favorpp)
    is_generalized_exponential = True
    best_a = staticmethod(fits.best_a_of_head)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPDense(Exponential):
    """FAVOR++ with one A per direction: `Exponential` by `fits.dense`.

    While it is not calibrated, it measures A of each sequence, as `FavorPP` does.
    """

    fitted = staticmethod(fits.dense)
    is_conditioned = True
    is_symmetric = False
    best_a = staticmethod(fits.best_a_of_directions)


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPLearned(Exponential):
    """The default map: `Exponential` by `fits.dense`, whose weights then train.

    Before calibration it is FAVOR+; `keras_rfattn.uptrain` calibrates and trains it.
    """

    fitted = staticmethod(fits.dense)
    trains = True
    is_conditioned = True
    is_symmetric = False
    is_unbiased = False
