"""Base classes of maps with random vectors.

The vectors are drawn from a seed and saved with the model.
"""

import math

import keras
from keras import ops

from keras_rfattn import projections
from keras_rfattn.arguments import check_sizes, derive_seed
from keras_rfattn.backend import precise_einsum
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.weights import integer
from keras_rfattn.kernels.variance import orthogonal_covariance
from keras_rfattn.ops.features import Features


class RandomFeatureMap(FeatureMap):
    """Base of maps with random vectors w for each key/value head.

    The method `project` computes `w · x` for all vectors.

    Args:
        num_features: Number of random vectors, which papers call m. Defaults to twice
            the head dim, and is `None` until the map is built.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    # The default, or `None` for twice the head dim.
    default_num_features = None

    def __init__(self, num_features=None, seed=None, **kwargs):
        super().__init__(seed=seed, **kwargs)
        if num_features is None:
            num_features = self.default_num_features
        else:
            check_sizes(num_features=num_features)
        self.num_features = num_features

    def build(self, input_shape):
        super().build(input_shape)
        if self.num_features is None:
            self.num_features = 2 * self.head_dim
        before = len(self._trainable_variables)
        self.add_vectors()
        # Whether random weights are trained, which `redraw` then refuses to replace.
        self.draws_trained = len(self._trainable_variables) > before
        self.draws = self.add_fixed("draws", "zeros", (), "int32")

    def initializer(self, draw, *which):
        """Returns the initializer of a draw; `which` tells several weights apart."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `initializer(draw)`."
        )

    def add_vectors(self):
        """Creates the random weights with the values of draw 0."""
        shape = self.num_heads, self.head_dim, self.num_features
        self.vectors = self.add_fixed("vectors", self.initializer(0), shape)

    def assign_vectors(self, draw):
        """Sets the random weights to the values of another draw."""
        self.vectors.assign(self.initializer(draw)(self.vectors.shape))

    def draw_again(self):
        draw = integer(self.draws) + 1
        self.assign_vectors(draw)
        self.draws.assign(draw)

    def project(self, x, vectors=None):
        """Returns `w · x` for all vectors w of a head, `(..., N, m)` for m vectors."""
        # Query head n uses the vectors `(K, H, m)` of key/value head `n // (N // K)`.
        vectors = self.vectors if vectors is None else vectors
        shape, groups = ops.shape(x), x.shape[-2] // self.num_heads
        if groups == 1:
            return precise_einsum("...kh,khm->...km", x, vectors)
        x = ops.reshape(x, (*shape[:-2], self.num_heads, groups, self.head_dim))
        x = precise_einsum("...kgh,khm->...kgm", x, vectors)
        return ops.reshape(x, (*shape[:-1], self.num_features))

    def get_config(self):
        return {**super().get_config(), "num_features": self.num_features}


class ProjectedFeatureMap(RandomFeatureMap):
    """Base of maps of `w · x` whose vectors w are drawn by a `Projection`.

    Args:
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        num_features, seed, **kwargs: As in `RandomFeatureMap`.
    """

    # Whether features are `D exp(A‖w‖² + B w·x + C‖x‖²)` with one A for all directions.
    # For these, `orthogonal_covariance` gives the effect of orthogonal vectors.
    is_generalized_exponential = False

    def __init__(self, num_features=None, projection="orthogonal", seed=None, **kwargs):
        super().__init__(num_features, seed, **kwargs)
        self.projection = projections.get(projection, self.seed)

    def initializer(self, draw, *which):
        if draw == 0 and not any(which):
            return self.projection
        config = self.projection.get_config()
        config["seed"] = derive_seed(config["seed"], draw, *which)
        return type(self.projection).from_config(config)

    def reseeded(self, seed):
        config = {**self.get_config(), "seed": int(seed)}
        projection = config["projection"]
        own = {**projection["config"], "seed": int(seed)}
        config["projection"] = {**projection, "config": own}
        return type(self).from_config(config)

    def relative_covariance(self, head=0):
        projection = self.projection
        is_known = self.is_generalized_exponential and (
            isinstance(projection, projections.Orthogonal) and projection.norms == "chi"
        )
        if not is_known:
            return None
        s, dim, count = self.sign(head), self.head_dim, self.num_features
        full, rest = divmod(count, dim)
        others = (full * dim * (dim - 1) + rest * (rest - 1)) / count
        return lambda x, y: others * orthogonal_covariance(x, y, s)

    def get_config(self):
        projection = keras.saving.serialize_keras_object(self.projection)
        return {**super().get_config(), "projection": projection}


class Activation(ProjectedFeatureMap):
    """Features `f(w · x) / √m` of a positive function f.

    Subclasses implement `log_activation(z)`, the logarithm of f.

    Args:
        **kwargs: The arguments of `ProjectedFeatureMap`; `num_features` is m.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), section 4.2,
        generalized attention.
    """

    kernel = "activation"
    is_unbiased = False

    def default_scale(self, head_dim):
        return 1.0

    def log_activation(self, z):
        """Returns `log f(z)`, elementwise: a finite number for every `z`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `log_activation(z)`."
        )

    def key_features(self, x):
        log_scale = self.log_activation(self.project(x))
        return Features(None, log_scale - math.log(self.num_features) / 2)
