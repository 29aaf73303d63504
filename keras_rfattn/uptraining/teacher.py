"""The softmax teacher, which shares the model that is trained."""

import contextlib

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.recording import recording


class Teacher:
    """The model with its first weights, and with softmax instead of linear attention.

    Weights that do not train are shared with the model. For weights that train, the
    teacher keeps a copy of their first values. Weights of maps need no copy, as
    softmax attention does not use them.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trained: Variables that train.

    Attributes:
        copies: Dict from the `id` of a trained variable to a `keras.Variable` with its
            first value.
    """

    def __init__(self, model, layers, trained):
        self.model, self.layers = model, layers
        of_maps = {id(v) for layer in layers for v in layer.feature_map.variables}
        self.copies = {
            id(v): keras.Variable(
                ops.copy(v.value), dtype=v.dtype, trainable=False, autocast=False
            )
            for v in trained
            if id(v) not in of_maps
        }

    def changed(self):
        """Returns the paths of weights that differ from their first values."""
        values = ((v, self.copies.get(id(v))) for v in self.model.variables)
        return tuple(
            v.path for v, first in values
            if first is not None and not np.array_equal(*map(_array, (v, first)))
        )  # fmt: skip

    def trains(self, layer):
        """Returns whether weights of a layer other than those of its map train."""
        return any(id(v) in self.copies for v in layer.variables)

    @contextlib.contextmanager
    def weights(self, live=()):
        """Context manager in which the model has its first weights.

        Args:
            live: Layers that keep their current weights.
        """
        if not self.copies:
            yield
            return
        live = {id(v) for layer in live for v in layer.variables}
        mapping = []
        for variable in self.model.variables:
            copy = None if id(variable) in live else self.copies.get(id(variable))
            mapping.append((variable, (variable if copy is None else copy).value))
        with keras.StatelessScope(mapping):
            yield

    def __call__(self, function, x):
        """Returns `function(x)`, computed by the softmax model without gradients."""
        recorders = [(layer, Attention.softmax) for layer in self.layers]
        with self.weights(), recording(recorders), without_gradients():
            return function(x)


def _array(variable):
    return ops.convert_to_numpy(variable.value)
