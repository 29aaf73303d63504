"""The weights that train, and the softmax teacher that keeps their first values."""

import contextlib

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import without_gradients
from keras_rfattn.feature_maps.weights import as_numpy, trained_weights
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import projection, title
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.holders import holders, refresh
from keras_rfattn.models.optimizers import following


def variables_to_train(model, layers, stages, optimizer=None):
    """Selects the variables that each stage trains, and adds adapters for `"lora"`."""
    maps = [v for layer in layers for v in _weights_of_map(layer)]
    selected = {
        stage.name: once([*maps, *_weights_of_model(model, layers, stage.trainable)])
        for stage in stages
        if stage.trainable != "lora"
    }
    for stage in stages:
        if not selected.get(stage.name, True):
            mechanisms = sorted({type(layer.feature_map).__name__ for layer in layers})
            asked = stage.trainable
            frozen = "" if asked == "maps" else ", and its own weights are frozen"
            raise ValueError(
                f"Nothing would train in stage {stage.name!r}: {title(model)} has "
                f"{', '.join(mechanisms)} without trainable weights{frozen}. Received: "
                f"trainable={asked!r}. Use a learned map such as 'hedgehog' whose "
                "`trainable` is True, or `keras_rfattn.uptraining.Stage(..., "
                "trainable='query_key')` if queries and keys are not frozen."
            )
    if optimizer is None:
        _check_precision([v for variables in selected.values() for v in variables])
    for stage in stages:
        if stage.trainable == "lora":
            selected[stage.name] = once([*maps, *_adapters(layers, stage)])
    return selected


def _weights_of_map(layer):
    """Returns the weights of a layer's map that uptraining trains."""
    feature_map = layer.feature_map
    if layer.trainable or feature_map.trainable:
        return [v for v in feature_map.variables if v.trainable]
    could_train = {id(v) for v in trained_weights(feature_map)}
    return [v for v in feature_map.variables if id(v) in could_train]


def _weights_of_model(model, layers, trainable):
    """Returns the variables that train in a stage besides those of maps."""
    if trainable == "maps":
        return []
    if trainable == "all":
        return [v for v in model.variables if v.trainable]
    projections = _projections(layers, "query", "key")
    return [v for dense in projections for v in dense.variables if v.trainable]


def _projections(layers, *sides):
    return once(projection(layer, side) for layer in layers for side in sides)


def _check_precision(variables):
    """Raises `ValueError` if weights are too narrow for the default optimizer."""
    narrow = [v for v in variables if v.dtype in ("float16", "bfloat16")]
    if narrow:
        raise ValueError(
            f"{len(narrow)} weights to train, such as {narrow[0].path!r}, are "
            f"{narrow[0].dtype}, which is too coarse for the averages and the small "
            "steps of Adam. Load the model with dtype='mixed_bfloat16', train the maps "
            "or trainable='lora', or pass an `optimizer` that can train them."
        )


def _adapters(layers, stage):
    """Adds adapters to projections that have none; returns those the stage trains."""
    queries_and_keys = _projections(layers, "query", "key")
    others = _projections(layers, "value", "output")
    # A fused projection is both.
    projections = once([*queries_and_keys, *others])
    without = [x for x in projections if not getattr(x, "lora_enabled", False)]
    for dense in without:
        if getattr(dense, "kernel_constraint", None) is not None:
            raise ValueError(
                "Keras cannot add an adapter to a kernel with a constraint. "
                f"Received: trainable='lora', and {dense.path!r}, whose "
                f"`kernel_constraint` is "
                f"{dense.kernel_constraint!r}. Set it to None, or change `trainable`."
            )
    with following(without):
        for dense in without:
            dense.enable_lora(stage.lora_rank)
    for holder in holders(without):
        # Functions compiled before would keep running without the adapters.
        refresh(holder)
    trained = queries_and_keys if stage.name == "attention" else projections
    return [v for x in trained for v in (x.lora_kernel_a, x.lora_kernel_b)]


def fresh_adapters(model):
    """Returns variables of adapters that do not change outputs, as one side is 0."""
    return [
        variable
        for layer in model._flatten_layers()
        if getattr(layer, "lora_enabled", False)
        and not np.any(ops.convert_to_numpy(layer.lora_kernel_b))
        for variable in (layer.lora_kernel_a, layer.lora_kernel_b)
    ]


@contextlib.contextmanager
def only_training(model, variables):
    """Context manager in which only the given variables of a model are trainable."""
    wanted = {id(v) for v in variables}
    before = [(v, v.trainable) for v in model.variables]
    try:
        _set_trainable((v, id(v) in wanted) for v, _ in before)
        yield
    finally:
        _set_trainable(before)


def _set_trainable(pairs):
    for variable, value in pairs:
        # For some dtypes PyTorch raises even if `value` is `False`.
        if variable.trainable != value:
            variable.trainable = value


def once(items):
    """Returns the items in order, without repeated ones (compared by identity)."""
    return list({id(x): x for x in items}.values())


def values_of(variables):
    """Returns copies of the values of variables as a list of NumPy arrays."""
    return [np.array(as_numpy(v.value)) for v in variables]


def assign(variables, values):
    """Assigns values, as `values_of` returns them, to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class Teacher:
    """The model with its first weights, and with softmax instead of linear attention.

    Weights that do not train are shared with the model. For weights that train, the
    teacher keeps a copy of their first values, by `id` of the variable. Weights of maps
    need no copy, as softmax attention does not use them.
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
        return tuple(
            v.path
            for v in self.model.variables
            if id(v) in self.copies
            and not np.array_equal(*values_of([v, self.copies[id(v)]]))
        )

    def trains(self, layer):
        """Returns whether weights of a layer other than those of its map train."""
        return any(id(v) in self.copies for v in layer.variables)

    @contextlib.contextmanager
    def weights(self):
        """Context manager in which the model has its first weights."""
        if not self.copies:
            yield
            return
        mapping = [
            (variable, self.copies.get(id(variable), variable).value)
            for variable in self.model.variables
        ]
        with keras.StatelessScope(mapping):
            yield

    def __call__(self, function, x):
        """Returns `function(x)`, computed by the softmax model without gradients."""
        recorders = [(layer, Attention.softmax) for layer in self.layers]
        with self.weights(), recording(recorders), without_gradients():
            return function(x)
