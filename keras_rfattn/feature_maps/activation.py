"""Maps of a positive function of a token ("elu") or of its projections ("relu").

They do not estimate softmax attention, so that a softmax model needs training after its
attention is replaced. As in the papers, queries and keys are not scaled by the factor
`1/√head_dim` of softmax attention.
"""

import math

import keras
from keras import ops

from keras_rfattn.arguments import check_no_num_features
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Features


class Activation(ProjectedFeatureMap):
    """Features `f(w · x) / √m` of a positive function f.

    Subclasses implement `log_activation(z)`, the logarithm of f.

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


@keras.saving.register_keras_serializable("keras_rfattn")
class Relu(Activation):
    """Performer-ReLU features `(relu(w · x) + 0.001) / √m`.

    The constant is part of the kernel, as in the paper's code, and not a numerical
    stabilizer. Without it, a query may share no nonzero feature with any key, which
    leaves its attention undefined. Arguments, errors and reference are those of
    `Activation`.
    """

    kernel = "relu"

    def log_activation(self, z):
        return ops.log(ops.relu(z) + 1e-3)


@keras.saving.register_keras_serializable("keras_rfattn")
class Elu(FeatureMap):
    """Features `elu(x) + 1` of the linear transformer, of width head_dim.

    Args:
        num_features: Must be `None`, because the head dim decides the width.
        seed: Unused.

    Raises:
        ValueError: If `num_features` is given.

    Reference:
        Katharopoulos et al., "Transformers are RNNs" (2020), equation 7.
    """

    kernel = "elu"

    def __init__(self, num_features=None, **kwargs):
        check_no_num_features(type(self), num_features)
        super().__init__(**kwargs)

    def default_scale(self, head_dim):
        return 1.0

    def key_features(self, x):
        return Features(None, ops.where(x > 0, ops.log1p(ops.relu(x)), -ops.relu(-x)))
