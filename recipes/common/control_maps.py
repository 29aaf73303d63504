"""Feature maps that serve as controls; not a recipe itself.

Importing this file registers the names "one_feature" and "window_alone".
"""

from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops import Features


@feature_maps.register("one_feature")
class OneFeature(feature_maps.FeatureMap):
    """A map with weights `exp(u·k)` for any query; uniform before training."""

    kernel, is_unbiased, is_symmetric, num_features = "one", False, False, 1

    def build(self, input_shape):
        super().build(input_shape)
        shape = self.num_heads, self.head_dim
        self.gate = self.add_trained("gate", "zeros", shape)

    def query_features(self, x, stats=None):
        return Features(None, 0 * ops.cast(x[..., :1], "float32"))

    def key_features(self, x, stats=None):
        x = ops.cast(x, "float32")
        gate = self.per_head(ops.convert_to_tensor(self.gate), x)
        return Features(None, ops.sum(gate * x, axis=-1, keepdims=True))


@feature_maps.register("window_alone")
class WindowAlone(feature_maps.FeatureMap):
    """A map that gives no weight to keys beyond the window, which has exact softmax."""

    kernel, is_unbiased, is_symmetric, num_features = "softmax", False, False, 1

    def query_features(self, x, stats=None):
        return Features(None, 0 * ops.cast(x[..., :1], "float32"))

    def key_features(self, x, stats=None):
        return Features(None, 0 * ops.cast(x[..., :1], "float32") - 1e9)
