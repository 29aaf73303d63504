"""Maps of generalized attention: an activation of a token or of its projection."""

import math

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import is_number, refuse_vectors
from keras_rfattn.feature_maps.base import FeatureMap, without
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features


class OfActivation:
    """Mixin of maps that apply a positive function f, given by its logarithm.

    These maps do not estimate softmax attention, so that a softmax model needs
    uptraining after its attention is replaced. As in the papers, queries and keys are
    not scaled by the factor `1/√head_dim` of softmax attention.
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


class Elementwise(OfActivation, FeatureMap):
    """Features `f(x)` of width head_dim. Subclasses implement `log_activation(z)`.

    Args:
        seed: Unused.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def key_features(self, x):
        return Features(None, self.log_activation(x))


class Activation(OfActivation, ProjectedFeatureMap):
    """Features `f(w · x) / √m`. Subclasses implement `log_activation(z)`.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `projection` is
            unknown.

    Reference:
        Choromanski et al., "Rethinking Attention with Performers" (2021), section 4.2,
        generalized attention.

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> class Softplus(feature_maps.Activation):
        ...     def log_activation(self, z):
        ...         return keras.ops.log(keras.ops.softplus(z))
        >>> Softplus(num_features=32, seed=0).output_dim
        32
    """

    def key_features(self, x):
        log_scale = self.log_activation(self.project(x))
        return Features(None, log_scale - math.log(self.num_features) / 2)


class OfElu:
    """Mixin for the activation `f(z) = elu(z) + 1`."""

    def log_activation(self, z):
        return ops.where(z > 0, ops.log1p(ops.relu(z)), -ops.relu(-z))


class OfRelu:
    """Mixin for the activation `f(z) = relu(z) + epsilon`."""

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
    """Features `elu(x) + 1` of the linear transformer, of width head_dim.

    Args:
        num_features: Must be `None`, because the head dim decides the width.
            `ProjectedElu` takes a number of features.
        projection: Must be `None`, because the map has no random vectors.
        seed: Unused.

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
            # The file was saved when `Elu` also had random vectors.
            return ProjectedElu.from_config(config)
        return cls(**without(config, "projection"))

    def get_config(self):
        return {**super().get_config(), "num_features": None}


@keras.saving.register_keras_serializable("keras_rfattn")
class ProjectedElu(OfElu, Activation):
    """Features `(elu(w · x) + 1) / √m`.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, or `projection` is
            unknown.

    Reference:
        Katharopoulos et al., "Transformers are RNNs" (2020), equation 7, for the
        activation; Choromanski et al., "Rethinking Attention with Performers" (2021),
        section 4.2, for random vectors.
    """


@keras.saving.register_keras_serializable("keras_rfattn")
class Relu(OfRelu, Activation):
    """Performer-ReLU features `(relu(w · x) + epsilon) / √m`.

    Epsilon is part of the kernel, not a numerical stabilizer. Without it, a query may
    share no nonzero feature with any key, which leaves its attention undefined.

    Args:
        num_features: Number m of random vectors w, twice the head dim by default.
        epsilon: Positive number added to each activation, 0.001 by default as in the
            paper's code.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `epsilon` is not
            positive, or `projection` is unknown.

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
            # The file was saved when `Relu` could also lack random vectors.
            return PlainRelu.from_config(config)
        return cls(**config)


@keras.saving.register_keras_serializable("keras_rfattn")
class PlainRelu(OfRelu, Elementwise):
    """Features `relu(x) + epsilon` of width head_dim, without random vectors.

    Args:
        epsilon: Positive number added to each activation, 0.001 by default. `Relu`
            explains why it is needed.
        seed: Unused.

    Raises:
        ValueError: If `epsilon` is not positive.
    """

    @classmethod
    def from_config(cls, config):
        return cls(**without(config, "projection", "num_features"))

    def get_config(self):
        # Fingerprints include `num_features`. `None` keeps them equal to those of files
        # saved when this class was part of `Relu`.
        return {**super().get_config(), "num_features": None}
