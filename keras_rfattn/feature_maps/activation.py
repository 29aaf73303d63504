"""Generalized kernels: an activation of the token or of its projection."""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import is_number
from keras_rfattn.feature_maps.arguments import refuse_vectors
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.base import without
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.precision import wide_dtype


class OfActivation:
    """Mixin of maps with a positive function f of their own, by its logarithm.

    A replaced model needs uptraining to become what it was. Queries and keys enter as
    they are, without the factor `1/√head_dim` of softmax attention, as in the papers.
    """

    kernel = "activation"
    is_unbiased = False

    def default_scale(self, head_dim):
        return 1.0

    def log_activation(self, z):
        """`log f(z)`, elementwise."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `log_activation(z)`."
        )


class Elementwise(OfActivation, FeatureMap):
    """Features `f(x)`, of width head_dim. Subclasses give `log_activation(z)`."""

    def key_features(self, x, stats=None):
        return Features(None, self.log_activation(ops.cast(x, wide_dtype(x))))


class Activation(OfActivation, ProjectedFeatureMap):
    """Features `f(w · x) / √m`. Subclasses give `log_activation(z)`.

    Args:
        num_features: Number m of random vectors, 256 by default.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.
    """

    def key_features(self, x, stats=None):
        log_scale = self.log_activation(self.project(x))
        return Features(None, log_scale - math.log(self.num_features) / 2)


class OfElu:
    """Mixin: `f(z) = elu(z) + 1`."""

    def log_activation(self, z):
        return ops.where(z > 0, ops.log1p(ops.relu(z)), -ops.relu(-z))


class OfRelu:
    """Mixin: `f(z) = relu(z) + epsilon`."""

    def __init__(self, *args, epsilon=1e-3, **kwargs):
        super().__init__(*args, **kwargs)
        if not is_number(epsilon) or not epsilon > 0:
            raise ValueError(
                f"`epsilon` must be positive. Received: epsilon={epsilon!r}."
            )
        self.epsilon = epsilon

    def log_activation(self, z):
        return ops.log(ops.relu(z) + self.epsilon)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


@keras.saving.register_keras_serializable("keras_rfattn")
class Elu(OfElu, Elementwise):
    """The linear transformer's `elu(x) + 1`, of width head_dim.

    Args:
        num_features: Only `None`; `ProjectedElu` has a width.
        projection: Only `None`.
        seed: Of nothing.

    Raises:
        ValueError: If `num_features` or `projection` is given.

    Reference:
        Katharopoulos et al., "Transformers are RNNs" (2020), equation 7.
    """

    kernel = "elu"
    is_unbiased = True

    def __init__(self, num_features=None, projection=None, **kwargs):
        refuse_vectors(type(self), num_features, projection, "`ProjectedElu`")
        super().__init__(**kwargs)

    @classmethod
    def from_config(cls, config):
        if config.get("projection") is not None:
            # Of files from when one class did both.
            return ProjectedElu.from_config(config)
        return cls(**without(config, "projection"))

    def get_config(self):
        return {**super().get_config(), "num_features": None}


@keras.saving.register_keras_serializable("keras_rfattn")
class ProjectedElu(OfElu, Activation):
    """`(elu(w · x) + 1) / √m`.

    Args:
        num_features: Number m of random vectors, 256 by default.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.
    """

    former_name = "Elu"


@keras.saving.register_keras_serializable("keras_rfattn")
class Relu(OfRelu, Activation):
    """Performer-ReLU: `(relu(w · x) + epsilon) / √m`.

    Epsilon belongs to the kernel (it is not a stabiliser): without it a query can
    have no feature in common with any key, and its attention no meaning.

    Args:
        num_features: Number m of random vectors, 256 by default.
        epsilon: Positive number, 0.001 by default as in the paper's code.
        projection: `"orthogonal"` (default), `"gaussian"` or a `Projection`.
        seed: Non-negative integer, or `None`.

    Raises:
        ValueError: If `epsilon` is not positive.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), section
        4.2, generalized attention.
    """

    kernel = "relu"

    def __init__(self, num_features=None, epsilon=1e-3, **kwargs):
        super().__init__(num_features, epsilon=epsilon, **kwargs)

    @classmethod
    def from_config(cls, config):
        if "projection" in config and config["projection"] is None:
            # Of files from when one class did both.
            return PlainRelu.from_config(config)
        return cls(**config)


@keras.saving.register_keras_serializable("keras_rfattn")
class PlainRelu(OfRelu, Elementwise):
    """`relu(x) + epsilon`, of width head_dim; see `Relu`.

    Args:
        epsilon: Positive number, 0.001 by default.
        seed: Of nothing.

    Raises:
        ValueError: If `epsilon` is not positive.
    """

    former_name = "Relu"

    @classmethod
    def from_config(cls, config):
        return cls(**without(config, "projection", "num_features"))

    def get_config(self):
        # The width is a part of fingerprints, which were the same for both classes.
        return {**super().get_config(), "num_features": None}
