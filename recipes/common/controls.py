"""The controls of a comparison, as feature maps and as arms; not a recipe itself.

Importing this file registers the names "one_feature" and "window_alone".
"""

import keras
from keras import ops

import keras_rfattn
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

    def query_features(self, x):
        return Features(None, 0 * ops.cast(x[..., :1], "float32"))

    def key_features(self, x):
        x = ops.cast(x, "float32")
        gate = self.per_head(ops.convert_to_tensor(self.gate), x)
        return Features(None, ops.sum(gate * x, axis=-1, keepdims=True))


@feature_maps.register("window_alone")
class WindowAlone(feature_maps.FeatureMap):
    """A map that gives no weight to keys beyond the window, which has exact softmax."""

    kernel, is_unbiased, is_symmetric, num_features = "softmax", False, False, 1

    def query_features(self, x):
        return Features(None, 0 * ops.cast(x[..., :1], "float32"))

    def key_features(self, x):
        return Features(None, 0 * ops.cast(x[..., :1], "float32") - 1e9)


def set_attention(model, name, mechanism, seed):
    """Gives a softmax model the attention of an arm, in place.

    "softmax", "uniform" and "no_attention" are controls. For any other arm, `mechanism`
    is `(name of a feature map, its arguments, further arguments of replace_attention)`.

    Returns:
        A dict with the width of the features; empty for a control, or with a window.
    """
    if name == "softmax":
        return {}
    if name == "no_attention":
        silence(model)
        return {}
    if name == "uniform":
        # At this temperature all attention weights are equal to seven digits.
        mechanism = "favorplus", {"num_features": 1}, {"temperature": 1e14}
    map_name, arguments, options = mechanism
    feature_map = feature_maps.get(map_name, seed=seed, **arguments)
    keras_rfattn.replace_attention(model, feature_map, seed=seed, **options)
    if name == "uniform" or "window" in options:
        return {}
    return {"width": keras_rfattn.describe_attention(model).replaced[0].width}


def silence(model):
    """Makes attention output 0, in training too."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.MultiHeadAttention):
            dense = layer.output_dense
            dense.set_weights([0 * weight for weight in dense.get_weights()])
            layer.trainable = False
