"""The weights that train, and the softmax teacher that keeps their first values."""

import contextlib

import keras
from keras import ops

from keras_rfattn.backend import without_gradients
from keras_rfattn.feature_maps.weights import trained_weights
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import projection, title
from keras_rfattn.layers.recording import recording


def variables_to_train(model, layers, stages, optimizer=None):
    """Returns a dict from the name of each stage to the variables that it trains."""
    selected = {}
    for stage in stages:
        variables = _selected(model, layers, stage.trainable)
        if not variables:
            maps = sorted({type(layer.feature_map).__name__ for layer in layers})
            raise ValueError(
                f"`model` must have weights that stage {stage.name!r} can train. "
                f"Received: {title(model)} with {', '.join(maps)}, and "
                f"trainable={stage.trainable!r}, which selects no weight that is not "
                "frozen. Use a learned map such as 'hedgehog' whose `trainable` is "
                "True, or `keras_rfattn.uptraining.Stage(..., trainable='query_key')` "
                "if queries and keys are not frozen."
            )
        narrow = [v for v in variables if v.dtype in ("float16", "bfloat16")]
        if narrow and optimizer is None:
            raise ValueError(
                "Weights that Adam trains must be float32, because their averages and "
                f"small steps need it. Received: {len(narrow)} weights, such as "
                f"{narrow[0].path!r}, which are {narrow[0].dtype}. Load the model with "
                "dtype='mixed_bfloat16', train only the maps, or pass an `optimizer` "
                "that can train them."
            )
        selected[stage.name] = variables
    return selected


def _selected(model, layers, trainable):
    """Returns the variables that a stage trains."""
    variables = list(model.trainable_variables) if trainable == "all" else []
    for layer in layers:
        feature_map = layer.feature_map
        is_frozen = not (layer.trainable or feature_map.trainable)
        own = trained_weights(feature_map)
        variables += own if is_frozen else feature_map.trainable_variables
        if trainable == "query_key":
            for side in ("query", "key"):
                variables += projection(layer, side).trainable_variables
    return list({id(v): v for v in variables}.values())


@contextlib.contextmanager
def only_training(model, variables):
    """Context manager in which only the given variables of a model are trainable."""
    wanted = {id(v) for v in variables}
    # For some dtypes PyTorch raises even if the value of `trainable` stays the same.
    changed = [v for v in model.variables if v.trainable != (id(v) in wanted)]
    try:
        for variable in changed:
            variable.trainable = not variable.trainable
        yield
    finally:
        for variable in changed:
            variable.trainable = id(variable) not in wanted


def paths(layers):
    """Returns the paths of layers for messages."""
    return ", ".join(f"'{layer.path}'" for layer in layers)


class Teacher:
    """The model with its first weights, and softmax instead of linear attention."""

    def __init__(self, model, layers, trained):
        self.model, self.layers = model, layers
        # First values by `id` of the variable. Weights that do not train are the
        # model's, and softmax attention does not use those of maps.
        of_maps = {id(v) for layer in layers for v in layer.feature_map.variables}
        self.copies = {
            id(v): keras.Variable(
                ops.copy(v.value), dtype=v.dtype, trainable=False, autocast=False
            )
            for v in trained
            if id(v) not in of_maps
        }

    def weights(self):
        """Returns a context manager in which the model has its first weights."""
        if not self.copies:
            return contextlib.nullcontext()
        values = [(v, self.copies.get(id(v), v).value) for v in self.model.variables]
        return keras.StatelessScope(values)

    def __call__(self, function, x):
        """Returns `function(x)`, computed by the softmax model without gradients."""
        recorders = [(layer, Attention.softmax) for layer in self.layers]
        with self.weights(), recording(recorders), without_gradients():
            return function(x)


class StageModel(keras.Model):
    """The model that a stage fits; a subclass defines `call` and `measured`."""

    def __init__(self, teacher, stage):
        super().__init__(dtype="float32", name=f"{stage.name}_stage")
        self.teacher, self.model = teacher, teacher.model
        self.stage, self.learning = stage, list(teacher.layers)
        self.learning_rate = min(x.feature_map.learning_rate for x in self.learning)
        # Keras passes only variables that it knows to a compiled function.
        self.first_values = list(teacher.copies.values())
        self.error = keras.metrics.Mean("error")
        self.built = True

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        error, loss = self.measured(y_pred)
        self.error.update_state(error)
        # PyTorch requires a gradient even if no output depends on a trained weight, as
        # with windows that cover whole sequences.
        weight = self.trainable_variables[0]
        return loss + 0 * ops.sum(ops.clip(ops.cast(weight, "float32"), -1, 1))
