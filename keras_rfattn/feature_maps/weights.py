"""Weights of feature maps: float32 whatever the dtype policy, fixed or trained."""

from keras import ops

from keras_rfattn.feature_maps.names import FixedNames
from keras_rfattn.feature_maps.trained import check_untrained
from keras_rfattn.feature_maps.trained import is_as_drawn
from keras_rfattn.feature_maps.trained import mark
from keras_rfattn.feature_maps.trained import start_anew
from keras_rfattn.feature_maps.trained import unchanged_on_error


class Weights(FixedNames):
    """Mixin of Keras layers: weights with fixed paths, and random ones drawn again."""

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

    @property
    def was_trained(self):
        """Whether training changed a weight of the map since the library set it.

        The library sets weights in `build`, `redraw` and `adapt`. The answer follows
        from the weights themselves, so that it survives saving and loading.
        """
        return self.built and not is_as_drawn(self)

    def redraw(self, discard_training=False):
        """Replaces what is random by the next draw of the same seed.

        The number of draws is saved with the model. Never called by the library.

        Args:
            discard_training: Whether a map whose vectors were trained is redrawn too.
                All its weights then start anew, and it is not calibrated any more.

        Raises:
            ValueError: If the map has no random vectors, is not built, or its vectors
                were trained and `discard_training` is false. The map is unchanged then.
        """
        if not self.built:
            raise ValueError(
                f"{type(self).__name__} has no random vectors to redraw yet. Received: "
                "built=False. Build it first."
            )
        parts = self._flatten_layers()
        replaces = any(getattr(x, "draws_trained", False) for x in parts)
        if replaces:
            check_untrained(self, discard_training, "redraw")
        is_untrained = not self.was_trained
        with unchanged_on_error([self]):
            if replaces and not is_untrained:
                start_anew(self)
            self.draw_again()
            if replaces or is_untrained:
                mark(self)

    def draw_again(self):
        """Assigns the next draw, for `redraw`."""
        raise ValueError(
            f"{type(self).__name__} has no random vectors to redraw. Received: "
            "a map that draws none. Use a map with random vectors, such as 'favorpp'."
        )


def _start(value, shape):
    """Shape and initializer of a weight."""
    if callable(value) or isinstance(value, str):
        return shape, value

    def initializer(shape, dtype=None):
        return ops.convert_to_tensor(value.astype(dtype))

    return value.shape, initializer
