"""Weights of feature maps, which are float32 under every dtype policy."""

import keras
import numpy as np

from keras_rfattn.feature_maps.names import fix_names
from keras_rfattn.feature_maps.trained import (
    check_untrained,
    is_as_drawn,
    mark,
    start_anew,
    unchanged_on_error,
)


class Weights:
    """Mixin of Keras layers with fixed weight paths and random weights to redraw."""

    def __setattr__(self, name, value):
        fix_names(name, value)
        super().__setattr__(name, value)

    def add_trained(self, name, value, shape=None, dtype="float32", **kwargs):
        """Adds a weight that training changes and no dtype policy casts.

        Args:
            name: Name of the weight.
            value: Initial value, as a NumPy array, or an initializer.
            shape: Shape of the weight. Needed only if `value` is an initializer.
            dtype: `"float32"` (default) or `"int32"`.
            **kwargs: Further arguments of `keras.layers.Layer.add_weight`.

        Returns:
            The `keras.Variable`.
        """
        if isinstance(value, np.ndarray):
            shape, value = value.shape, keras.initializers.Constant(value)
        return self.add_weight(
            name=name, shape=shape, initializer=value, dtype=dtype, autocast=False,
            **kwargs,
        )  # fmt: skip

    def add_fixed(self, name, value, shape=None, dtype="float32"):
        """Adds a weight as `add_trained` does, but one that no optimizer changes."""
        return self.add_trained(name, value, shape, dtype, trainable=False)

    @property
    def was_trained(self):
        """Whether training changed a weight of the map since the library set it.

        The library sets weights in `build`, `redraw` and `adapt`. The answer is
        computed from the weights, so that it is the same after saving and loading.
        """
        return self.built and not is_as_drawn(self)

    def redraw(self, discard_training=False):
        """Replaces the random vectors by the next draw of the same seed.

        The number of draws is saved with the model. The library never calls this
        method by itself.

        Args:
            discard_training: Whether to redraw a map even if its vectors were trained.
                All of its weights are then reset to their initial values, and it is no
                longer calibrated. Defaults to `False`.

        Raises:
            ValueError: If the map has no random vectors, is not built, or its vectors
                were trained and `discard_training` is false. The map is then unchanged.
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
