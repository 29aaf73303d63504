"""Stage "features": the linear model end to end against the frozen softmax model.

Errors of layers that learn side by side pile up over depth; here the last hidden states
are compared, by relative squared error and by cosine (as in the second stage of
"ViT-AdaLA"), or the logits of a model with a head, by their Kullback-Leibler divergence
(as in the second step of "RADLADS").
"""

import keras
from keras import ops

from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.ops.gradients import without_gradients

TINY = 1e-9
OBJECTIVES = ("auto", "features", "logits")
# Of KerasHub's tasks, those whose head belongs to the checkpoint.
OWN_HEADS = ("CausalLM", "MaskedLM", "Seq2SeqLM")


class FeaturesStage(keras.Model):
    """Trains all that is to be trained by what comes out of the model at the end.

    Args:
        teacher: `Teacher` of a model with linear attention.
        objective: `"features"`, `"logits"` or `"auto"`.
        window_dropout: Share of batches in which a layer leaves its window out.
    """

    def __init__(self, teacher, objective="auto", window_dropout=0.0):
        super().__init__(dtype="float32", name="features_stage")
        self.teacher, self.model = teacher, teacher.model
        self.first_values = list(teacher.copies.values())
        self.objective = resolved(objective, self.model)
        self.learning, self.window_dropout = list(teacher.layers), window_dropout
        self.error = keras.metrics.Mean("error")
        self.zero = keras.metrics.Mean("zero")
        # Of the model without attention, measured before.
        self.control = 1.0
        self.built = True

    def outputs(self, x):
        """`(output, mask)` of the model for everything that is compared."""
        model = self.model
        backbone = getattr(model, "backbone", None)
        if self.objective == "features" and backbone is not None:
            model = backbone
            names = getattr(backbone, "input", None)
            if isinstance(x, dict) and isinstance(names, dict):
                x = {name: x[name] for name in names}
        found = model(x, training=False)
        if isinstance(found, (list, tuple)):
            found = {f"{i}": x for i, x in enumerate(found)}
        named = found if isinstance(found, dict) else {"": found}
        named = {k: v for k, v in named.items() if not isinstance(v, (list, tuple))}
        named = {k: v for k, v in named.items() if ops.is_tensor(v)}
        if not named:
            raise ValueError(
                "Stage 'features' compares what the model puts out. Received: "
                f"{type(self.model).__name__}, whose output holds no tensor. Leave the "
                "stage out (`stages=`)."
            )
        tokens = {k: v for k, v in named.items() if len(v.shape) == 3}
        return [(v, mask_of(k, v, x)) for k, v in (tokens or named).items()]

    def call(self, inputs):
        """A list of `(wanted, given, mask)`."""
        x, noise = inputs["x"], inputs["noise"]
        wanted = self.teacher(self.outputs, x)
        recorders = []
        if self.window_dropout:
            recorders = [
                (layer, without_window(noise[0, i] < self.window_dropout))
                for i, layer in enumerate(self.learning)
                if layer.options.window is not None
            ]
        with recording(recorders):
            given = self.outputs(x)
        pairs = zip(wanted, given, strict=True)
        return [(a, b, mask) for (a, mask), (b, _) in pairs]

    def without_attention(self, x):
        """The error of the model whose attention puts out 0, a number."""
        wanted = self.teacher(self.outputs, x)
        recorders = [(layer, Attention.zero) for layer in self.learning]
        with recording(recorders), without_gradients():
            given = self.outputs(x)
        pairs = zip(wanted, given, strict=True)
        error, _ = self.measure([(a, b, mask) for (a, mask), (b, _) in pairs])
        return float(ops.convert_to_numpy(error))

    def measure(self, pairs):
        """`(error, loss)`, means over the outputs."""
        compare = divergence if self.objective == "logits" else distance
        found = [compare(*pair) for pair in pairs]
        return tuple(sum(x) / len(found) for x in zip(*found, strict=True))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None,
                     training=True):  # fmt: skip
        error, loss = self.measure(y_pred)
        self.error.update_state(error)
        self.zero.update_state(self.control)
        # Windows over whole sequences have a gradient too, if 0; PyTorch wants one.
        weight = self.trainable_variables[0]
        return loss + 0 * ops.sum(ops.clip(ops.cast(weight, "float32"), -1, 1))


def resolved(objective, model):
    """What `"auto"` stands for: logits where the checkpoint has a head of its own."""
    if objective != "auto":
        return objective
    names = {cls.__name__ for cls in type(model).__mro__}
    return "logits" if names & set(OWN_HEADS) else "features"


def mask_of(name, output, x):
    """Which tokens of an output are real, `(B, T)`, or `None` for all.

    KerasHub's models are given it by name, others propagate it as Keras does.
    """
    prefix = name.partition("_sequence_output")[0]
    names = [f"{prefix}_padding_mask", "padding_mask", "decoder_padding_mask"]
    masks = [x[n] for n in names if n in x] if isinstance(x, dict) else []
    masks.append(getattr(output, "_keras_mask", None))
    for mask in masks:
        if mask is not None and len(output.shape) == 3:
            if mask.shape[1] == output.shape[1]:
                return ops.cast(mask, "bool")
    return None


def without_window(dropped):
    """A recorder that leaves the window out where `dropped`, a boolean, is true."""

    def recorder(call):
        return ops.cond(dropped, call.without_window().linear, call.linear)

    return recorder


def distance(wanted, given, mask):
    """Relative squared error, and the loss: with one minus the mean cosine."""
    wanted, given = ops.cast(wanted, "float32"), ops.cast(given, "float32")
    real = _real(mask, wanted)
    squared = ops.sum(real * ops.sum(ops.square(given - wanted), axis=-1))
    norm = ops.sum(ops.square(wanted), axis=-1)
    error = squared / ops.maximum(ops.sum(real * norm), TINY)
    lengths = ops.sqrt(norm * ops.sum(ops.square(given), axis=-1) + TINY)
    cosine = ops.sum(real * ops.sum(wanted * given, axis=-1) / lengths)
    return error, error + 1 - cosine / ops.maximum(ops.sum(real), 1)


def divergence(wanted, given, mask):
    """Mean Kullback-Leibler divergence of distributions over the last axis, twice."""
    wanted, given = (
        ops.log_softmax(ops.cast(x, "float32"), axis=-1) for x in (wanted, given)
    )
    real = _real(mask, wanted)
    found = ops.sum(ops.exp(wanted) * (wanted - given), axis=-1)
    mean = ops.sum(real * found) / ops.maximum(ops.sum(real), 1)
    return mean, mean


def _real(mask, x):
    if mask is None:
        return ops.ones_like(x[..., 0])
    return ops.cast(mask, x.dtype)
