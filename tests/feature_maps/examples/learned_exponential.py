import keras
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops import Features


@feature_maps.register("learned_exponential")
@keras.saving.register_keras_serializable("my_project")
class LearnedExponential(feature_maps.FeatureMap):
    """Features `exp(Wx)`, W trainable, `(K, H, num_features)`.

    Args:
        num_features: Width, 16 by default.
        seed: Of W's first value.
    """

    kernel = "learned_exponential"
    is_unbiased = False

    def __init__(self, num_features=None, **kwargs):
        super().__init__(**kwargs)
        self.num_features = 16 if num_features is None else num_features

    def build(self, input_shape):
        super().build(input_shape)
        start = keras.initializers.RandomNormal(0.2, seed=self.seed)
        shape = self.num_heads, self.head_dim, self.num_features
        self.w = self.add_trained("w", start, shape)

    def key_features(self, x):
        w = ops.cast(self.per_head(self.w, x), x.dtype)
        return Features(None, ops.einsum("...nh,nhm->...nm", x, w))

    def get_config(self):
        return {**super().get_config(), "num_features": self.num_features}
