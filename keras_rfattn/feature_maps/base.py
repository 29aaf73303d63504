"""The laws of a feature map.

A map is a Keras layer that turns queries and keys into `Features`. It never knows
which algorithm will sum them. Every row of the registry is tested for these laws:

1. `stats = map.statistics(query, key, ...)`, then `query_features(x, stats)` and
   `key_features(x, stats)`, each `(..., N, H) -> Features`. The feature methods
   reduce over the last axis only: a token's features depend on no other token but
   through `stats`.
2. Stabilisation is returned, never applied: a map takes no maximum and adds no
   epsilon. Exponential maps return their whole exponent as `log_scale` with
   `values=None`.
3. `E[φ_q(x) · φ_k(y)] = kernel(x, y)` if `is_unbiased`; features are positive if
   `is_positive`; `is_causal_safe` unless a statistic of the sequence at hand
   enters the features.
4. Random vectors are a float32 weight that is saved with the model and the same on
   every backend for the same seed (`projected.py`). Nothing is random in a call.
5. Projection and exponent are computed in float32.
6. What a map learns of data is a weight, set by `adapt` (`adaptive.py`) or trained.
7. The features of a token that is not finite are NaN, whatever the map's own
   arithmetic would make of it, and entries beyond ±1e13 count as that. `FeatureMap`
   sees to both, around the methods of its subclasses.
"""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.feature_maps.stateless import FeatureFunction
from keras_rfattn.feature_maps.stateless import complete
from keras_rfattn.feature_maps.weights import Weights
from keras_rfattn.kernels import values
from keras_rfattn.ops.features import Deferred
from keras_rfattn.ops.kernel_attention import Softmax
from keras_rfattn.ops.precision import repeat_each


class FeatureMap(Weights, keras.layers.Layer):
    """Base class of feature maps: the laws, and nothing random.

    A subclass writes `key_features`, and `query_features` if they differ; creates its
    weights in `build` (after `super().build`), trainable or by `add_fixed`; and says by
    the attributes below what it estimates. What it knows of its own variance it tells
    by `log_moment`.

    Args:
        seed: Non-negative integer; drawn by Keras' global seed if `None`.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    # What products of features estimate: a function of `kernels/values.py` if unbiased.
    kernel = "softmax"
    is_unbiased = True
    is_positive = True
    # Whether equal queries and keys have equal features.
    is_symmetric = True
    # Whether features of a token never depend on other tokens of its row.
    is_causal_safe = True
    # Whether the map has parameters that `adapt` measures on data.
    is_adaptive = False
    # Whether products of features are the kernel, without error.
    has_exact_features = False
    # Whether attention is by the kernel alone, without features.
    is_exact = False
    # Whether features are exponentials of products, which `exponents` gives.
    has_exponents = False
    # Whether `prepare` changes queries and keys.
    is_preparing = False
    # Whether estimates are precise only for queries and keys of one length.
    assumes_equal_lengths = False
    # Number of random vectors, or what else decides the width; `None` if nothing does.
    num_features = None
    # Default of `uptrain`, which trains it against attention.
    learning_rate = 0.02
    # Of a map in an attention layer, where a file may be a softmax checkpoint's.
    presence = None
    # What fingerprints in files call the class, if not by its name.
    former_name = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        complete(cls)

    def __init__(self, *, seed=None, **kwargs):
        super().__init__(**kwargs)
        check_seed(seed)
        if seed is None:
            # The first word of a fresh generator follows `keras.utils.set_random_seed`.
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        self.seed = int(seed)

    @property
    def exact_kernel(self):
        """The kernel as `ops.kernel_attention` computes it, `None` if it cannot be."""
        return Softmax() if self.kernel == "softmax" else None

    @property
    def output_dim(self):
        """Width M of the features; may need a built map."""
        return self.num_features or self.head_dim

    @property
    def num_projections(self):
        """Number of vectors that a token is multiplied by; may need a built map."""
        return self.num_features or 0

    @property
    def features_per_scale(self):
        """Width of `log_scale`: M, or 1 where a token's features share one."""
        return self.output_dim

    def default_scale(self, head_dim):
        """What `q · k` is multiplied by, each side with its square root.

        `1/√head_dim` for estimators of softmax attention.
        """
        return 1 / math.sqrt(head_dim)

    def prepare(self, query, key):
        """What queries and keys become before they are scaled."""
        return query, key

    def build(self, input_shape):
        """Creates the weights.

        Args:
            input_shape: Shape of the keys, `(..., K, H)`.
        """
        self.num_heads, self.head_dim = input_shape[-2:]

    def reseeded(self, seed):
        """The same map with another seed, not built."""
        return type(self).from_config({**self.get_config(), "seed": int(seed)})

    def statistics(
        self,
        query,
        key,
        query_mask=None,
        key_mask=None,
        causal=False,
        training=False,
    ):
        """What the features need to know of the data, `None` for most maps.

        Args:
            query: Scaled queries, `(B, T, N, H)`.
            key: Scaled keys, `(B, S, K, H)`.
            query_mask: Optional `(B, T)`, true for real tokens.
            key_mask: Optional `(B, S)`, true for real tokens.
            causal: Whether a query may see only part of the tokens at hand, so that
                nothing measured on them may enter.
            training: Whether a moving average should be updated.

        Returns:
            What `query_features` and `key_features` take: a pytree of arrays whose
            first axis is B (or 1), or `None`.
        """
        return None

    def query_features(self, x, stats=None):
        """Features of scaled queries `(..., N, H)`, as `Features` `(..., N, M)`."""
        return self.key_features(x, stats)

    query_features.marked = lambda self, x, stats=None: type(self).key_features.marked(
        self, x, stats
    )

    def key_features(self, x, stats=None):
        """Features of scaled keys `(..., K, H)`, as `Features` `(..., K, M)`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `key_features(x, stats)`."
        )

    def deferred(self, method, x, stats=None):
        """`"query_features"` or `"key_features"` of x, for an algorithm to compute.

        Returns:
            `keras_rfattn.ops.features.Deferred`, which computes `Marked` features.
        """
        weights = [v.value for v in self.variables]
        return Deferred(FeatureFunction(self, method), x, (stats, weights))

    def exponents(self, method, x, stats=None):
        """`Exponents` of finite tokens; args as of `deferred`, x float32 or float64."""
        raise NotImplementedError(f"{type(self).__name__} has no `exponents`.")

    def common_exponent(self, method, x, stats=None):
        """What the exponents of all features of a token have besides, `(..., K, R, 1)`.

        Args as of `exponents`, but x, which is that of the `Exponents`, heads first:
        `(..., K, R, H)`. Apart, as attention does not depend on a query's.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `exponents`.")

    def status(self, causal):
        """Where parameters come from, for reports; nothing for most maps.

        Args:
            causal: Whether attention is causal; `None` where each call decides.
        """
        return ""

    def kernel_values(self, query, key):
        """The kernel itself, `(..., T, S)` of arrays `(..., T, H)` and `(..., S, H)`.

        Raises:
            AttributeError: If no closed form of it is known to `kernels/values.py`.
        """
        return getattr(values, self.kernel)(query, key)

    def log_moment(self, head=0, stats=None):
        """The second moment of one draw of the estimate, from its closed form.

        Args:
            head: Which key/value head.
            stats: What `statistics` gives, where its parameters are not stored.

        Returns:
            A function `(x, y) -> log E[Z²]` of pairs `(..., H)` of what the random
            vectors meet (`meets`), NumPy arrays; or `None` if no closed form is known.
        """
        return None

    def relative_covariance(self, head=0):
        """What dependence between draws adds to the relative variance of one.

        Returns:
            A function of pairs, as that of `log_moment`, or `None` if draws are
            independent, or taken to be.
        """
        return None

    def sign(self, head=0):
        """The s of `‖x + s y‖²`, with which the variance grows: 1 or -1."""
        return 1

    def meets(self, query, key, head=0):
        """What the random vectors meet of `(..., H)` arrays: themselves, mostly."""
        return query, key

    def per_head(self, parameter, x):
        """A parameter `(K, ...)` beside the heads of `x`, `(..., N, H)`: `(N, ...)`."""
        groups = x.shape[-2] // self.num_heads
        return parameter if groups == 1 else repeat_each(parameter, groups, axis=0)

    def load_own_variables(self, store):
        """Loads saved weights; of a softmax checkpoint, which has none, nothing.

        Raises:
            ValueError: If they are missing although the attention layer was saved with
                this map, or are there although it was not.
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
        """Does nothing: exponents need float32 (law 5)."""

    def get_config(self):
        return {**super().get_config(), "seed": self.seed}


def half_square(x):
    """`‖x‖² / 2` over the last axis, kept: `(..., H) -> (..., 1)`."""
    return ops.sum(ops.square(x), axis=-1, keepdims=True) / 2


def number(weight, head):
    """A weight of one head as float64 NumPy, for closed forms."""
    return ops.convert_to_numpy(weight)[head].astype("float64")


def without(config, *names):
    """A config without arguments that are `None` and that the class does not take."""
    return {k: v for k, v in config.items() if k not in names or v is not None}
