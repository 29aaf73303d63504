"""The base class of feature maps, and the laws that every feature map keeps.

A feature map is a Keras layer that turns queries and keys into `Features`. It does
not know which algorithm will sum them. Shapes use B for the batch, T for the sequence
length, K for key/value heads, G for query heads per key/value head, N = K · G for
heads, H for the head dim and M for the number of features. Every registered map is
tested for these laws:

1. Callers first compute `stats = map.statistics(query, key, ...)`. They then call
   `query_features(x, stats)` and `key_features(x, stats)`, each of which maps
   `(..., N, H)` to `Features`. These methods reduce over the last axis only, so that
   a token's features depend on other tokens only through `stats`.
2. A map does not stabilize its features: it subtracts no maximum and adds no epsilon.
   It returns exponents as `log_scale`, and the algorithm shifts them. Exponential maps
   return their whole exponent as `log_scale`, with `values=None`.
3. If `is_unbiased`, then `E[φ_q(x) · φ_k(y)] = kernel(x, y)`. If `is_positive`,
   features are positive. A map is `is_causal_safe` unless a statistic of the current
   sequence enters its features.
4. Random vectors are a float32 weight. It is saved with the model and is the same on
   every backend for the same seed (`projected.py`). A call draws nothing at random.
5. Projections and exponents are computed in float32.
6. Everything that a map learns from data is a weight. Either `adapt` sets it
   (`adaptive.py`), or training does.
7. Tokens with finite entries up to 1e13 have finite exponents. For -inf, an exponent is
   `ops.features.LOWEST`. Layers replace other tokens before a map receives them.
"""

import math

import keras
from keras import ops

from keras_rfattn.arguments import check_seed
from keras_rfattn.backend import repeat_each
from keras_rfattn.feature_maps.stateless import FeatureFunction, complete
from keras_rfattn.feature_maps.weights import Weights
from keras_rfattn.kernels import values
from keras_rfattn.ops.deferred import Deferred
from keras_rfattn.ops.kernel_attention import Softmax


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

    Raises:
        ValueError: If `seed` is neither `None` nor a non-negative integer.

    Examples:
        >>> from keras_rfattn import feature_maps, layers, ops
        >>> class Sigmoid(feature_maps.FeatureMap):
        ...     kernel = "sigmoid"
        ...     is_unbiased = False
        ...     def key_features(self, x, stats=None):
        ...         return ops.Features(None, keras.ops.log_sigmoid(x))
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=Sigmoid())
    """

    # The kernel that products of features estimate. If the map is unbiased, this is the
    # name of a function in `kernels/values.py`.
    kernel = "softmax"
    is_unbiased = True
    is_positive = True
    # Whether a query and a key with equal entries have equal features.
    is_symmetric = True
    # Whether a token's features never depend on other tokens of its row.
    is_causal_safe = True
    # Whether the map has parameters that `adapt` measures on data.
    is_adaptive = False
    # Whether products of features equal the kernel, without error.
    has_exact_features = False
    # Whether attention always evaluates the kernel itself, without features.
    is_exact = False
    # Whether features are exponentials of products, which `exponents` returns.
    has_exponents = False
    # Whether `prepare` changes queries and keys.
    is_preparing = False
    # Whether estimates are precise only if all queries and keys have equal norms.
    assumes_equal_lengths = False
    # Number of random vectors, or another number that decides the width M. `None` if
    # the head dim alone decides it.
    num_features = None
    # Default learning rate of `uptrain`, which trains the map to imitate softmax.
    learning_rate = 0.02
    # Set by the owning layer, which uses it to recognize softmax checkpoints on load.
    presence = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        complete(cls)

    def __init__(self, *, seed=None, **kwargs):
        super().__init__(**kwargs)
        check_seed(seed)
        if seed is None:
            # A new generator's first word is determined by
            # `keras.utils.set_random_seed`.
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        self.seed = int(seed)

    @property
    def measures_sequence(self):
        """Whether `statistics` may measure the sequence at hand, if not causal."""
        return not self.is_causal_safe

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
        """Returns the factor on `q · k`; each side is multiplied by its square root.

        Estimators of softmax attention use `1/√head_dim`.
        """
        return 1 / math.sqrt(head_dim)

    def prepare(self, query, key):
        """Returns queries and keys as they must be before they are scaled."""
        return query, key

    def build(self, input_shape):
        """Creates the weights.

        Args:
            input_shape: Shape of the keys, `(..., K, H)`, for K heads of dim H.
        """
        self.num_heads, self.head_dim = input_shape[-2:]

    def reseeded(self, seed):
        """Returns an unbuilt copy of the map with another seed."""
        return type(self).from_config({**self.get_config(), "seed": int(seed)})

    def statistics(
        self, query, key, query_mask=None, key_mask=None, causal=False, training=False
    ):
        """Returns the statistics that the features need, which is `None` for most maps.

        Args:
            query: Scaled queries of shape `(B, T, N, H)`.
            key: Scaled keys of shape `(B, S, K, H)`.
            query_mask: Optional boolean mask of shape `(B, T)`, true for real tokens.
            key_mask: Optional boolean mask of shape `(B, S)`, true for real tokens.
            causal: Whether a query may see only part of the tokens. If so, the result
                must not depend on `query` and `key`.
            training: Whether stored moving averages are updated.

        Returns:
            The argument `stats` of `query_features` and `key_features`: a pytree of
            arrays whose first axis is B (or 1), or `None`.
        """
        return None

    def query_features(self, x, stats=None):
        """Computes the features of queries.

        Args:
            x: Scaled queries of shape `(..., N, H)`.
            stats: The result of `statistics`.

        Returns:
            `Features` of shape `(..., N, M)`.
        """
        return self.key_features(x, stats)

    def key_features(self, x, stats=None):
        """Computes the features of keys.

        Args:
            x: Scaled keys of shape `(..., K, H)`.
            stats: The result of `statistics`.

        Returns:
            `Features` of shape `(..., K, M)`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `key_features(x, stats)`."
        )

    def deferred(self, method, x, stats=None):
        """Returns features that an algorithm computes later, when it needs them.

        Args:
            method: `"query_features"` or `"key_features"`.
            x: Scaled queries or keys, the argument of that method.
            stats: The result of `statistics`.

        Returns:
            A `keras_rfattn.ops.deferred.Deferred`.
        """
        weights = [v.value for v in self.variables]
        return Deferred(FeatureFunction(self, method), x, (stats, weights))

    def exponents(self, method, x, stats=None):
        """Returns the exponents of the features as `ops.Exponents`.

        Args:
            method: `"query_features"` or `"key_features"`.
            x: Scaled queries or keys of shape `(B, ..., N, H)`, finite, in float32 or
                float64.
            stats: The result of `statistics`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `exponents`.")

    def common_exponent(self, method, x, stats=None):
        """Returns the exponent term that all features of a token share.

        It is separate from `exponents` because attention does not depend on this term
        of a query, so that algorithms can skip it.

        Args:
            method: `"query_features"` or `"key_features"`.
            x: The `x` of the result of `exponents`, with heads first: `(..., K, R, H)`,
                where R counts the tokens of all G query heads of a group.
            stats: The result of `statistics`.

        Returns:
            Array of shape `(..., K, R, 1)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `exponents`.")

    def status(self, causal):
        """Returns text for reports that says where parameters come from.

        Args:
            causal: Whether attention is causal, or `None` if each call decides.

        Returns:
            A string. It is empty for maps without parameters that data set.
        """
        return ""

    def kernel_values(self, query, key):
        """Evaluates the kernel exactly.

        Args:
            query: Array of shape `(..., T, H)`.
            key: Array of shape `(..., S, H)`.

        Returns:
            Array of shape `(..., T, S)`.

        Raises:
            AttributeError: If `kernels/values.py` has no closed form of the kernel.
        """
        return getattr(values, self.kernel)(query, key)

    def log_moment(self, head=0, stats=None):
        """Returns a function for the second moment of one draw Z of the estimate.

        Args:
            head: Index of the key/value head.
            stats: The result of `statistics`, for maps that do not store their
                parameters.

        Returns:
            A function `(x, y) -> log E[Z²]`, where x and y are NumPy arrays of shape
            `(..., H)` that `before_projection` returns. `None` if no closed form is
            known.
        """
        return None

    def relative_covariance(self, head=0):
        """Returns a function for the variance that dependent draws add.

        The function gives the amount that dependence between draws adds to the relative
        variance of one draw.

        Args:
            head: Index of the key/value head.

        Returns:
            A function of the same arguments `(x, y)` as that of `log_moment`. `None` if
            draws are independent, or are treated as independent.
        """
        return None

    def sign(self, head=0):
        """Returns the s (1 or -1) for which the variance grows with `‖x + s y‖²`."""
        return 1

    def before_projection(self, query, key, head=0):
        """Returns the queries and keys `(..., H)` that random vectors project.

        They are the arguments, unless the map transforms them first.
        """
        return query, key

    def per_head(self, parameter, x):
        """Repeats a parameter `(K, ...)` for the N heads of `x`, `(..., N, H)`.

        Returns:
            Array of shape `(N, ...)`, with the dtype of `x`.
        """
        groups = x.shape[-2] // self.num_heads
        parameter = ops.cast(parameter, x.dtype)
        return parameter if groups == 1 else repeat_each(parameter, groups, axis=0)

    def load_own_variables(self, store):
        """Loads saved weights, or nothing from a softmax checkpoint, which has none.

        Raises:
            ValueError: If the file lacks the weights although its attention layer was
                saved with this map, or has them although it was not.
        """
        if not self._trainable_variables and not self._non_trainable_variables:
            return
        found = len(store.keys()) > 0
        if found or self.presence is None:
            super().load_own_variables(store)
        if self.presence is not None:
            refusal = self.presence.compare(id(self), found)
            if refusal is not None:
                raise ValueError(f"In feature map '{self.path}': {refusal}.")

    def quantize(self, mode=None, type_check=True, config=None):
        """Does nothing, because exponents need float32 (law 5)."""

    def get_config(self):
        return {**super().get_config(), "seed": self.seed}


class Sided:
    """Mixin of maps that compute both sides in `_features(x, stats, is_key)`.

    The mixin must come before `FeatureMap` in the bases.
    """

    def query_features(self, x, stats=None):
        return self._features(x, stats, is_key=False)

    def key_features(self, x, stats=None):
        return self._features(x, stats, is_key=True)


def half_square(x):
    """Returns `‖x‖² / 2` over the last axis, of shape `(..., 1)`."""
    return ops.sum(ops.square(x), axis=-1, keepdims=True) / 2


def number(weight, head):
    """Returns a weight of one head as a float64 NumPy array, for closed forms."""
    return ops.convert_to_numpy(weight)[head].astype("float64")


def without(config, *names):
    """Returns a config without those of the named entries that are `None`."""
    return {k: v for k, v in config.items() if k not in names or v is not None}
