"""Maps of a positive function of a token ("elu") or of its projections ("relu").

They do not estimate softmax attention, so that a softmax model needs training after its
attention is replaced. As in the papers, queries and keys are not scaled by the factor
`1/√head_dim` of softmax attention.
"""

import keras
from keras import ops

from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.projected import Activation
from keras_rfattn.ops.features import Features


def check_no_num_features(cls, num_features):
    """Raises `ValueError` if a map that takes no `num_features` is given any."""
    if num_features is not None:
        raise ValueError(
            f"`num_features` must be `None` for {cls.__name__}, which has no random "
            "vectors, and whose width follows from the head dim. Received: "
            f"num_features={num_features!r}. Use `None`, or a map with random vectors."
        )


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
    is_unbiased = False  # its features alone define its kernel

    def __init__(self, num_features=None, **kwargs):
        check_no_num_features(type(self), num_features)
        super().__init__(**kwargs)

    def default_scale(self, head_dim):
        return 1.0

    def key_features(self, x):
        return Features(None, ops.where(x > 0, ops.log1p(ops.relu(x)), -ops.relu(-x)))
