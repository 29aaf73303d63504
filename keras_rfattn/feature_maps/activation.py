"""Generalized kernels: an activation of the token or of its projection."""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.ops.backend import wide_dtype
from keras_rfattn.ops.features import Features


class Activation(FeatureMap):
    """Features `f(w · x) / √m`, or `f(x)` itself without a projection.

    Positive, with a kernel of their own instead of softmax's: a replaced model
    needs uptraining to become what it was. Queries and keys enter as they are,
    without the factor `1/√head_dim` of softmax attention, as in the papers.

    Subclasses give `log_activation(z)`, the logarithm of a positive `f(z)`.
    """

    def default_scale(self, head_dim):
        return 1.0

    def key_features(self, x, stats=None):
        if self.projection is None:
            return Features(None, self.log_activation(ops.cast(x, wide_dtype(x))))
        log_scale = self.log_activation(self.project(x))
        return Features(None, log_scale - math.log(self.num_features) / 2)

    def log_activation(self, z):
        """`log f(z)`, elementwise."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `log_activation(z)`."
        )


@keras.saving.register_keras_serializable("keras_rfattn")
class Elu(Activation):
    """The linear transformer's `elu(x) + 1`, without a projection by default.

    Args:
        num_features: Number of random vectors, if there is a projection.
        projection: `None` (default): features of width head_dim; else as in
            `FeatureMap`.
        seed: Non-negative integer, or `None`.

    Reference:
        Katharopoulos et al., "Transformers are RNNs" (2020), equation 7.
    """

    kernel = "elu"

    def __init__(self, num_features=None, projection=None, **kwargs):
        super().__init__(num_features, projection, **kwargs)

    def log_activation(self, z):
        return ops.where(z > 0, ops.log1p(ops.relu(z)), -ops.relu(-z))


@keras.saving.register_keras_serializable("keras_rfattn")
class Relu(Activation):
    """Performer-ReLU: `relu(w · x) + epsilon`.

    Epsilon belongs to the kernel (it is not a stabiliser): without it a query can
    have no feature in common with any key, and its attention no meaning.

    Args:
        num_features: Number m of random vectors, 256 by default.
        epsilon: Positive number, 0.001 by default as in the paper's code.
        projection: `"orthogonal"` (default), `"gaussian"`, a `Projection`, or
            `None` for `relu(x) + epsilon`.
        seed: Non-negative integer, or `None`.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), section
        4.2, generalized attention.
    """

    kernel = "relu"
    is_unbiased = False

    def __init__(self, num_features=None, epsilon=1e-3, **kwargs):
        super().__init__(num_features, **kwargs)
        if not epsilon > 0:
            raise ValueError(
                f"`epsilon` must be positive. Received: epsilon={epsilon}."
            )
        self.epsilon = epsilon

    def log_activation(self, z):
        return ops.log(ops.relu(z) + self.epsilon)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}
