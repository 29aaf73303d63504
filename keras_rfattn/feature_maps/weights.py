"""Weights of feature maps: float32 whatever the dtype policy, fixed or trained."""

from keras import ops

from keras_rfattn.feature_maps.names import FixedNames


class Weights(FixedNames):
    """Mixin of Keras layers that adds such weights, whose paths are fixed."""

    def add_fixed(self, name, value, shape=None, dtype="float32"):
        """A weight that no optimizer changes and no dtype policy casts.

        Args:
            name: Name of the weight.
            value: Its first value, a NumPy array; or an initializer, with `shape`.
            shape: Shape for an initializer.
            dtype: `"float32"` or `"int32"`.
        """
        shape, initializer = _start(value, shape)
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, dtype=dtype,
            trainable=False, autocast=False,
        )  # fmt: skip

    def add_trained(self, name, value, shape=None, **kwargs):
        """A weight that training changes and no dtype policy casts, float32.

        Args:
            name: Name of the weight.
            value: Its first value, a NumPy array; or an initializer, with `shape`.
            shape: Shape for an initializer.
            **kwargs: Of `keras.layers.Layer.add_weight`.
        """
        shape, initializer = _start(value, shape)
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, dtype="float32",
            autocast=False, **kwargs,
        )  # fmt: skip


def _start(value, shape):
    """Shape and initializer of a weight."""
    if callable(value) or isinstance(value, str):
        return shape, value

    def initializer(shape, dtype=None):
        return ops.convert_to_tensor(value.astype(dtype))

    return value.shape, initializer
