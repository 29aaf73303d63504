"""A learned map that imitates softmax attention by a softmax over its features."""

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import check_sizes
from keras_rfattn.backend import precise_einsum
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.ops.features import Features
from keras_rfattn.projections.base import haar


@keras.saving.register_keras_serializable("keras_rfattn")
class Hedgehog(FeatureMap):
    """Features `[softmax(Wx), softmax(-Wx)]`, with a trained matrix W per head.

    Queries and keys have separate matrices. A square W starts as the identity, any
    other W as a random orthogonal matrix. `uptrain` trains the matrices to imitate
    softmax attention; before training, the map does not estimate softmax attention.
    Features have width `2 · num_features`.

    Args:
        num_features: Number of rows of W, the head dim by default.
        seed: Seed of the initial W if it is not square. If `None`, it is drawn from
            Keras' global seed generator.

    Reference:
        Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with
        Softmax Mimicry" (2024).
    """

    is_unbiased = False
    is_symmetric = False
    learning_rate = 0.06

    def __init__(self, num_features=None, **kwargs):
        super().__init__(**kwargs)
        if num_features is not None:
            check_sizes(num_features=num_features)
        self.num_features = num_features

    @property
    def num_projections(self):
        return self.num_features or self.head_dim

    @property
    def output_dim(self):
        return 2 * self.num_projections

    def build(self, input_shape):
        super().build(input_shape)
        start = self.first_kernel()
        self.query_kernel = self.add_trained("query_kernel", start)
        self.key_kernel = self.add_trained("key_kernel", start)

    def first_kernel(self):
        """Returns the initial W of each head, of shape `(K, H, rows)`."""
        shape = self.num_heads, self.head_dim, self.num_projections
        if self.num_projections == self.head_dim:
            return np.broadcast_to(np.eye(self.num_projections), shape)
        generator = np.random.Generator(np.random.Philox(self.seed))
        tall = shape[0], max(shape[1:]), min(shape[1:])
        start = haar(generator, *tall)
        return start.swapaxes(-1, -2) if tall == shape else start

    def query_features(self, x):
        return self._features(x, self.query_kernel)

    def key_features(self, x):
        return self._features(x, self.key_kernel)

    def _features(self, x, kernel):
        kernel = self.per_head(ops.convert_to_tensor(kernel), x)
        z = precise_einsum("...nh,nhm->...nm", x, kernel)
        halves = [ops.log_softmax(z, axis=-1), ops.log_softmax(-z, axis=-1)]
        return Features(None, ops.concatenate(halves, axis=-1))

    def get_config(self):
        return {**super().get_config(), "num_features": self.num_features}
