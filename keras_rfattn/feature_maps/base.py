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
4. Random vectors are a float32 weight that is saved with the model and the same
   on every backend for the same seed. Nothing random happens in a call.
5. Projection and exponent are computed in float32.
6. What a map learns of data is a weight, set by `adapt`; see `adaptive.py`.
7. The features of a token that is not finite are NaN, whatever the map's own
   arithmetic would make of it, and entries beyond ±1e13 count as that. `FeatureMap`
   sees to both, around the methods of its subclasses.
"""

import math

import keras
from keras import ops

from keras_rfattn import projections
from keras_rfattn.feature_maps.arguments import check_num_features
from keras_rfattn.feature_maps.arguments import derive_seed
from keras_rfattn.feature_maps.function import FeatureFunction
from keras_rfattn.feature_maps.function import of_finite_tokens
from keras_rfattn.ops.backend import precise_einsum
from keras_rfattn.ops.exact import Softmax
from keras_rfattn.ops.types import Deferred

DEFAULT_NUM_FEATURES = 256


class FeatureMap(keras.layers.Layer):
    """Base class of feature maps.

    Args:
        num_features: Number of random vectors, the papers' m. Defaults to 256.
        projection: Where they come from: `"orthogonal"` (default), `"gaussian"`, or
            a `keras_rfattn.projections.Projection`.
        seed: Non-negative integer; drawn by Keras' global seed if `None`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: If `num_features` is not a positive integer.
    """

    kernel = "softmax"
    is_unbiased = True
    is_positive = True
    # Whether equal queries and keys have equal features.
    is_symmetric = True
    # Of a map in an attention layer, where a file may be a softmax checkpoint's.
    presence = None
    # Whether estimates are precise only for queries and keys of one length.
    assumes_equal_lengths = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in ("query_features", "key_features"):
            # Looked up, as it may come from a mixin.
            method = getattr(cls, name)
            if not hasattr(method, "marked"):
                setattr(cls, name, of_finite_tokens(method))

    def __init__(self, num_features=None, projection="orthogonal", seed=None, **kwargs):
        super().__init__(**kwargs)
        if seed is None:
            # The first word of a fresh generator follows `keras.utils.set_random_seed`.
            state = keras.random.SeedGenerator().state
            seed = ops.convert_to_numpy(state)[0]
        self.seed = int(seed)
        self.projection = projections.get(projection, self.seed)
        if num_features is None and self.projection is not None:
            num_features = DEFAULT_NUM_FEATURES
        check_num_features(num_features, self.projection)
        self.num_features = num_features

    @property
    def is_causal_safe(self):
        """Whether features of a token never depend on other tokens of its row."""
        return True

    @property
    def is_adaptive(self):
        """Whether the map has parameters that `adapt` measures on data."""
        return False

    @property
    def is_exact(self):
        """Whether attention is by the kernel alone, without features."""
        return False

    @property
    def exact_kernel(self):
        """The kernel as `ops.exact` computes it, `None` if it cannot be."""
        return Softmax() if self.kernel == "softmax" else None

    @property
    def output_dim(self):
        """Width M of the features; needs a built map if it has no projection."""
        return self.num_features or self.head_dim

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
        """What queries and keys become before they are scaled: themselves, mostly."""
        return query, key

    def build(self, input_shape):
        """Creates the weights.

        Args:
            input_shape: Shape of the keys, `(..., K, H)`.
        """
        self.num_heads, self.head_dim = input_shape[-2:]
        if self.projection is not None:
            self.add_vectors()
            self.draws = self.add_weight(
                name="draws", shape=(), initializer="zeros", dtype="int32",
                trainable=False, autocast=False,
            )  # fmt: skip

    def add_vectors(self):
        """Creates the random weights, of draw 0."""
        self.vectors = self.add_weight(
            name="vectors",
            shape=(self.num_heads, self.head_dim, self.num_features),
            initializer=self.initializer(0),
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def assign_vectors(self, draw):
        """Sets the random weights to those of another draw."""
        self.vectors.assign(self.initializer(draw)(self.vectors.shape))

    def initializer(self, draw, *which):
        """The projection of a draw, and of one of several weights."""
        if draw == 0 and not any(which):
            return self.projection
        config = self.projection.get_config()
        config["seed"] = derive_seed(config["seed"], draw, *which)
        return type(self.projection).from_config(config)

    def reseeded(self, seed):
        """The same map with another seed, not built."""
        config = self.get_config()
        config["seed"] = int(seed)
        if config.get("projection") is not None:
            projection = dict(config["projection"])
            projection["config"] = {**projection["config"], "seed": int(seed)}
            config["projection"] = projection
        return type(self).from_config(config)

    def redraw(self):
        """Replaces the random vectors by the next draw of the same seed.

        The number of draws is saved with the model. Never called by the library.

        Raises:
            ValueError: If the map has no random vectors or is not built.
        """
        if not self.built or self.projection is None:
            raise ValueError(
                f"{type(self).__name__} has no random vectors to redraw. Received: "
                f"built={self.built}, projection={self.projection}."
            )
        draw = int(ops.convert_to_numpy(self.draws)) + 1
        self.assign_vectors(draw)
        self.draws.assign(draw)

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
            Anything that `query_features` and `key_features` take.
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
            `ops.features.Deferred`, which computes `Marked` features.
        """
        values = [v.value for v in self.variables]
        return Deferred(FeatureFunction(self, method), x, (stats, values))

    def project(self, x):
        """`w · x` for all vectors of the head of x: `(..., N, H) -> (..., N, m)`.

        N may be a multiple of the number K of heads the map was built for: query
        head n then uses the vectors of head `n // (N // K)`.
        """
        shape, groups = ops.shape(x), x.shape[-2] // self.num_heads
        if groups == 1:
            return precise_einsum("...kh,khm->...km", x, self.vectors)
        x = ops.reshape(x, (*shape[:-2], self.num_heads, groups, self.head_dim))
        x = precise_einsum("...kgh,khm->...kgm", x, self.vectors)
        return ops.reshape(x, (*shape[:-1], self.num_features))

    def per_head(self, parameter, x):
        """A parameter `(K, ...)` beside the heads of `x`, `(..., N, H)`: `(N, ...)`."""
        groups = x.shape[-2] // self.num_heads
        return parameter if groups == 1 else ops.repeat(parameter, groups, axis=0)

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
        projection = self.projection
        if projection is not None:
            projection = keras.saving.serialize_keras_object(projection)
        return {
            **super().get_config(),
            "num_features": self.num_features,
            "projection": projection,
            "seed": self.seed,
        }


def half_square(x):
    """`‖x‖² / 2` over the last axis, kept: `(..., H) -> (..., 1)`."""
    return ops.sum(ops.square(x), axis=-1, keepdims=True) / 2
