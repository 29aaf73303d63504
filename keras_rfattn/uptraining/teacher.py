"""The softmax model inside the model that is trained: no second one is made."""

import contextlib

import keras
import numpy as np
from keras import ops

from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.ops.gradients import without_gradients


class Teacher:
    """A model with the weights it had at first, and softmax for linear attention.

    Weights that do not train are shared; of the others, the maps' excepted, which
    softmax attention never asks, the first values are kept.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trained: Variables that train.

    Attributes:
        copies: `keras.Variable`s by the `id` of what they are the first values of.
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
        """Paths of the weights that are no longer what they were at first."""
        values = ((v, self.copies.get(id(v))) for v in self.model.variables)
        return tuple(
            v.path for v, first in values
            if first is not None and not np.array_equal(*map(_array, (v, first)))
        )  # fmt: skip

    def trains(self, layer):
        """Whether a layer's own weights train, and not its map alone."""
        return any(id(v) in self.copies for v in layer.variables)

    @contextlib.contextmanager
    def weights(self, live=()):
        """The first weights are in place meanwhile, but for those of `live` layers."""
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
        """`function(x)` of the softmax model; nothing that trains is in it."""
        recorders = [(layer, Attention.softmax) for layer in self.layers]
        with self.weights(), recording(recorders), without_gradients():
            return function(x)


def _array(variable):
    return ops.convert_to_numpy(variable.value)
