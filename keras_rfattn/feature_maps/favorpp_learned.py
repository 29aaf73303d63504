"""FAVOR++ with trained vectors, parameters and conditioning."""

import keras
from keras import ops

import keras_rfattn.feature_maps.registry as registry
from keras_rfattn.arguments import check_choice
from keras_rfattn.feature_maps.conditioned import Conditioned
from keras_rfattn.feature_maps.favorpp import FavorPP
from keras_rfattn.feature_maps.weights import mark

STARTS = ("favorplus", "favorpp", "favorpp_dense")


@keras.saving.register_keras_serializable("keras_rfattn")
class FavorPPLearned(Conditioned):
    """FAVOR++ with all parameters trained, optionally conditioned (see `Conditioned`).

    The trained parameters are the vectors w (separate ones for queries and keys), A,
    the conditioning matrices and centers, and a weight for every feature. Before
    training, the map computes exactly, bit for bit, what the map named by `start`
    computes, so that its estimate is unbiased. It is made for `uptrain`, whose stage
    "calibrate" sets the starting values.

    Args:
        num_features: Number m of vectors w, twice the head dim by default.
        start: The map that training starts from: `"favorplus"`, `"favorpp"` or
            `"favorpp_dense"` (default). The latter two start from calibrated values;
            before calibration they equal FAVOR+.
        projection: How the initial vectors are drawn: `"orthogonal"` (default),
            `"gaussian"` or a `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `start` or
            `projection` is unknown.

    Examples:
        >>> from keras_rfattn import feature_maps, layers
        >>> feature_map = feature_maps.FavorPPLearned(32, start="favorplus", seed=0)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 32)
    """

    is_trained = True
    is_unbiased = False

    def __init__(
        self,
        num_features=None,
        start="favorpp_dense",
        projection="orthogonal",
        seed=None,
        **kwargs,
    ):
        check_choice("start", start, STARTS)
        is_dense = start == "favorpp_dense"
        inner = TrainedOPRF(
            num_features, per_direction=is_dense, projection=projection, seed=seed
        )
        super().__init__(inner, up_to="rotate", **kwargs)
        self.start = start

    @classmethod
    def of(cls, feature_map):
        """Returns a built learned map that computes the same as another map.

        Args:
            feature_map: A built `FavorPlus` without pairs, or a calibrated `FavorPP` or
                `FavorPPDense`.

        Returns:
            A built `FavorPPLearned`.

        Raises:
            ValueError: If `feature_map` is another map, or is not built, or is not
                calibrated.
        """
        name = registry.name_of(feature_map)
        is_known = name in STARTS and feature_map.built
        is_known = is_known and not getattr(feature_map, "pair", False)
        if not is_known or not getattr(feature_map, "is_calibrated", True):
            raise ValueError(
                "`feature_map` must be a built FavorPlus without pairs, or a FavorPP "
                f"or FavorPPDense that is built and calibrated. Received: {name!r}, "
                f"built={feature_map.built}."
            )
        source = getattr(feature_map, "inner", feature_map)
        learned = cls(source.num_features, name, source.projection, feature_map.seed)
        learned.build((None, None, feature_map.num_heads, feature_map.head_dim))
        for weights in (learned.inner.query_vectors, learned.inner.key_vectors):
            weights.assign(source.vectors)
        if isinstance(source, FavorPP):
            learned.inner.adopt(source.mean_square)
        if source is not feature_map:
            for side in ("query_matrix", "key_matrix", "query_center", "key_center"):
                getattr(learned, side).assign(getattr(feature_map, side))
        learned.inner.draws.assign(source.draws)
        if learned.is_adaptive:
            for part in (learned, learned.inner):
                part.updates.assign(feature_map.updates)
            mark(learned)
        return learned

    @property
    def is_adaptive(self):
        return self.start != "favorplus"

    def log_moment(self, head=0, stats=None):
        return None

    def statistics(self, *args, **kwargs):
        return None

    def fit(self, samples):
        if self.start == "favorpp_dense":
            super().fit(samples)
        else:
            self.inner.adapt(samples)

    def get_config(self):
        inner = self.inner.get_config()
        config = {**keras.layers.Layer.get_config(self), "start": self.start}
        return config | {x: inner[x] for x in ("num_features", "projection", "seed")}


@keras.saving.register_keras_serializable("keras_rfattn")
class TrainedOPRF(FavorPP):
    """The map inside `FavorPPLearned`: FAVOR++ with trained vectors and A.

    OPRF stands for optimal positive random features, the features of FAVOR++.

    Args:
        num_features: Number m of vectors w, twice the head dim by default.
        **kwargs: Further arguments of `FavorPP`, except `statistics`.
    """

    is_unbiased = False
    is_symmetric = False

    def __init__(self, num_features=None, **kwargs):
        super().__init__(num_features, **{**kwargs, "statistics": "stored"})

    def add_vectors(self):
        shape = self.num_heads, self.head_dim, self.num_features
        self.query_vectors = self.add_trained(
            "query_vectors", self.initializer(0), shape
        )
        self.key_vectors = self.add_trained("key_vectors", self.initializer(0), shape)

    def assign_vectors(self, draw):
        for weight in (self.query_vectors, self.key_vectors):
            weight.assign(self.initializer(draw)(weight.shape))

    def build(self, input_shape):
        super().build(input_shape)
        directions = self.head_dim if self.per_direction else 1
        shape = self.num_heads, directions
        self.parameter = self.add_trained("a", "zeros", shape, constraint=NotPositive())
        shape = self.num_heads, self.num_features
        self.log_weights = self.add_trained("log_weights", "zeros", shape)

    def fit(self, samples):
        super().fit(samples)
        self.adopt(self.mean_square)

    def adopt(self, mean_square):
        """Sets A to the optimum of FAVOR++ for a mean square z."""
        a = self.optimal_a(ops.convert_to_tensor(mean_square))
        self.parameter.assign(ops.reshape(a, self.parameter.shape))

    def statistics(self, *args, **kwargs):
        return None

    def exponents(self, method, x, stats=None):
        is_query = method == "query_features"
        vectors = self.query_vectors if is_query else self.key_vectors
        a = ops.convert_to_tensor(self.parameter)
        found = self.exponents_by(vectors, x, a if self.per_direction else a[..., 0])
        weights = ops.expand_dims(ops.convert_to_tensor(self.log_weights), (0, 2))
        return found._replace(bias=found.bias + ops.cast(weights, x.dtype) / 2)


@keras.saving.register_keras_serializable("keras_rfattn")
class NotPositive(keras.constraints.Constraint):
    """Keeps A at most 0, because larger A can make the variance infinite."""

    def __call__(self, w):
        return ops.minimum(w, 0)
