"""The base class of feature maps, and the laws that every feature map keeps.

A feature map is a Keras layer that turns queries and keys into `Features`. It does
not know which algorithm will sum them. Shapes use B for the batch, T for the sequence
length, K for key/value heads, G for query heads per key/value head, N = K · G for
heads, H for the head dim and M for the number of features. Every registered map is
tested for these laws:

1. `query_features(x)` and `key_features(x)` map scaled tokens `(..., N, H)` to
   `Features` of shape `(..., N, M)`. They reduce over the last axis only, so that a
   token's features do not depend on other tokens. A map that depends on the sequence
   at hand is bound to it first: `map.bind(query, key, ...)` has the same two methods.
2. A map does not stabilize its features: it subtracts no maximum and adds no epsilon.
   It returns exponents as `log_scale`, and the algorithm shifts them. Positive maps
   return the whole feature as an exponent, with `values=None`.
3. If `is_unbiased`, then `E[φ_q(x) · φ_k(y)]` is the kernel, which `exact_kernel`
   computes. If `is_positive`, features are positive.
4. Random vectors are a float32 weight. It is saved with the model and is the same on
   every backend for the same seed (`projected.py`). A call draws nothing at random.
5. Projections and exponents are computed in float32.
6. Everything that a map learns from data is a weight. Either `adapt` sets it
   (`Adaptive`), or training does.
7. Tokens with finite entries up to 1e13 have finite exponents. For -inf, an exponent is
   `ops.features.LOWEST`. Layers replace other tokens before a map receives them.
"""

import contextvars
import functools
import math

import keras
from keras import ops

from keras_rfattn.arguments import check_seed
from keras_rfattn.backend import wide_dtype
from keras_rfattn.feature_maps.weights import Weights, trained_weights
from keras_rfattn.ops.kernel_attention import Softmax

# Functions of a built map that may refuse a change of its `trainable`.
BEFORE_FREEZING = []
# Whether what holds a map changes its own `trainable`, and with it that of the map.
_WITH_OWNER = contextvars.ContextVar("with_owner", default=False)


def set_trainable(layer, value):
    """Sets `trainable` of a layer and of all layers inside, as Keras does."""
    token = _WITH_OWNER.set(True)
    try:
        keras.layers.Layer.trainable.fset(layer, value)
    finally:
        _WITH_OWNER.reset(token)


class FeatureMap(Weights, keras.layers.Layer):
    """Base class of feature maps, without any random vectors.

    A subclass implements `key_features`, and also `query_features` if the two differ.
    It creates its weights in `build`, after `super().build`, with `add_fixed` or
    `add_trained`. It sets the class attributes below to say what it estimates. If the
    variance of its estimate has a closed form, it implements `log_moment`.

    Args:
        seed: Non-negative integer. If `None`, the seed is drawn from Keras' global
            seed generator.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    # The name of the kernel that products of features estimate.
    kernel = "softmax"
    is_unbiased = True
    is_positive = True
    # Whether a query and a key with equal entries have equal features.
    is_symmetric = True
    # Whether `bind` measures the sequence of bidirectional self-attention.
    measures_sequence = False
    # Whether the map has parameters that `adapt` measures on data.
    is_adaptive = False
    # Whether products of features equal the kernel, without error.
    has_exact_features = False
    # Whether attention always evaluates the kernel itself, without features.
    is_exact = False
    # Whether features are `ops.Exponents`, which fused kernels take.
    has_exponents = False
    # Whether `prepare` changes queries and keys.
    is_preparing = False
    # Number of random vectors, or another number that decides the width M. `None` if
    # the head dim alone decides it.
    num_features = None
    # Default learning rate of `uptrain`, which trains the map to imitate softmax.
    learning_rate = 0.02
    # Whether the file that was loaded last has the map's weights, which a softmax
    # checkpoint has not; `None` if the map belongs to no attention layer.
    in_file = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in ("query_features", "key_features"):
            definer = next(x for x in cls.__mro__ if name in vars(x))
            # A mixin, which is no feature map, may define the method, too.
            if definer is cls or not issubclass(definer, FeatureMap):
                setattr(cls, name, _in_float32(vars(definer)[name]))

    def __init__(self, *, seed=None, **kwargs):
        super().__init__(**kwargs)
        check_seed(seed)
        if seed is None:
            # A new generator's first word is determined by
            # `keras.utils.set_random_seed`.
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        self.seed = int(seed)

    @property
    def trainable(self):
        """Whether the map trains. Once an optimizer has trained, it cannot change alone."""
        return self._trainable

    @trainable.setter
    def trainable(self, value):
        changes = self.built and bool(value) != self._trainable
        if changes and trained_weights(self) and not _WITH_OWNER.get():
            for check in BEFORE_FREEZING:
                check(self)
        set_trainable(self, value)

    @property
    def exact_kernel(self):
        """The kernel for `ops.kernel_attention`, `None` if that cannot compute it."""
        return Softmax() if self.kernel == "softmax" else None

    @property
    def output_dim(self):
        """Width M of the features. Some maps must be built first."""
        return self.num_features or self.head_dim

    @property
    def num_projections(self):
        """Number of vectors that project a token. Some maps must be built first."""
        return self.num_features or 0

    @property
    def features_per_scale(self):
        """Width of `log_scale`: M, or 1 if a token's features share one exponent."""
        return self.output_dim

    def default_scale(self, head_dim):
        """Returns the factor on `q · k`; each side gets its square root."""
        return 1 / math.sqrt(head_dim)

    def prepare(self, query, key):
        """Returns queries and keys as they must be before they are scaled."""
        return query, key

    def build(self, input_shape):
        """Creates the weights, for keys of shape `(..., K, H)`."""
        self.num_heads, self.head_dim = input_shape[-2:]

    def reseeded(self, seed):
        """Returns an unbuilt copy of the map with another seed."""
        return type(self).from_config({**self.get_config(), "seed": int(seed)})

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        """Returns the map for one call, with the same two methods.

        They take tokens before they are scaled, and multiply them by `side`.

        Args:
            query: Queries of shape `(B, T, N, H)`, not scaled.
            key: Keys of shape `(B, S, K, H)`, not scaled.
            side: Square root of the factor on `q · k`.
            query_mask: Optional boolean mask of shape `(B, T)`, true for real tokens.
            key_mask: Optional boolean mask of shape `(B, S)`, true for real tokens.
            causal: Whether a query may not see all tokens that are measured: causal or
                cross-attention. If so, the result must not depend on `query` and `key`.

        Returns:
            A `Bound`.
        """
        return Bound(self, side)

    def query_features(self, x):
        """Returns the `Features` `(..., N, M)` of scaled queries `(..., N, H)`."""
        return self.key_features(x)

    def key_features(self, x):
        """Returns the `Features` `(..., K, M)` of scaled keys `(..., K, H)`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `key_features(x)`."
        )

    def status(self, causal):
        """Returns where parameters come from, or ""; `causal` may be `None`."""
        return ""

    def log_moment(self, head=0):
        """Returns a function `(x, y) -> log E[Z²]` of one draw Z, or `None`."""
        # x and y are NumPy arrays `(..., H)` that `before_projection` returns.
        return None

    def relative_covariance(self, head=0):
        """Returns a function `(x, y)`: what dependent draws add to the variance."""
        # Relative to the kernel squared. `None` if draws are taken to be independent.
        return None

    def sign(self, head=0):
        """Returns the s (1 or -1) for which the variance grows with `‖x + s y‖²`."""
        return 1

    def before_projection(self, query, key, head=0):
        """Returns the queries and keys `(..., H)` that random vectors project."""
        return query, key

    def per_head(self, parameter, x):
        """Repeats a parameter `(K, ...)` for the N heads of `x`, `(..., N, H)`."""
        groups = x.shape[-2] // self.num_heads
        parameter = ops.cast(parameter, x.dtype)
        return ops.repeat(parameter, groups, axis=0)

    @property
    def has_own_weights(self):
        """Whether the map has weights, apart from those of maps inside."""
        return bool(self._trainable_variables or self._non_trainable_variables)

    def load_own_variables(self, store):
        """Loads saved weights, or nothing from a softmax checkpoint, which has none."""
        if self.in_file is None:
            super().load_own_variables(store)
        elif self.has_own_weights:
            found, self.in_file = len(store.keys()) > 0, False
            try:
                if found:
                    super().load_own_variables(store)
            except ValueError as error:
                raise ValueError(
                    "The weights were saved with another mechanism or other arguments "
                    f"than feature map '{self.path}' has. {error}"
                ) from error
            self.in_file = found

    def quantize(self, mode=None, type_check=True, config=None):
        """Does nothing, because exponents need float32 (law 5)."""

    def get_config(self):
        return {**super().get_config(), "seed": self.seed}


class Bound:
    """A map for one call, whose methods take tokens not yet scaled by `side`."""

    def __init__(self, feature_map, side):
        self.feature_map, self.side = feature_map, side

    def __getattr__(self, name):
        return getattr(self.feature_map, name)

    def query_features(self, x):
        """Computes the features of queries `(B, T, N, H)`, not scaled."""
        return self.feature_map.query_features(self.side * ops.cast(x, wide_dtype(x)))

    def key_features(self, x):
        """Computes the features of keys `(B, S, K, H)`, not scaled."""
        return self.feature_map.key_features(self.side * ops.cast(x, wide_dtype(x)))


def _in_float32(method):
    """Wraps `query_features` or `key_features`, so that x is float32 or wider."""

    @functools.wraps(method)
    def features(self, x):
        if not self.built:
            raise ValueError(
                f"`{type(self).__name__}` must be built before it computes features. "
                "Received: built=False. Call `build((None, None, num_heads, "
                "head_dim))` first."
            )
        return method(self, ops.cast(x, wide_dtype(x)))

    return features


def half_square(x):
    """Returns `‖x‖² / 2` over the last axis, of shape `(..., 1)`."""
    return ops.sum(ops.square(x), axis=-1, keepdims=True) / 2


def number(weight, head):
    """Returns a weight of one head as a float64 NumPy array, for closed forms."""
    return ops.convert_to_numpy(weight)[head].astype("float64")
