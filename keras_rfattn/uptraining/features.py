"""Stage "features": trains the linear model end to end against the softmax model.

Errors of layers that learn side by side accumulate over depth. This stage therefore
compares the last hidden states, by relative squared error and by cosine (as in the
second stage of "ViT-AdaLA"), or the logits of a model with a head, by their
Kullback-Leibler divergence (as in the second step of "RADLADS").
"""

from keras import ops, tree

from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.uptraining.weights import StageModel

TINY = 1e-9
# KerasHub tasks whose head is part of the checkpoint.
OWN_HEADS = {"CausalLM", "MaskedLM", "Seq2SeqLM"}
# Objective -> measure that a stage reports, and learning rate of the maps.
OBJECTIVES = {
    "features": ("relative squared error of the model's outputs", 0.005),
    "logits": ("divergence of logits", 0.001),
}


class FeaturesStage(StageModel):
    """Trains the model end to end by comparing its final outputs with the teacher's."""

    def __init__(self, teacher, stage, batch):
        super().__init__(teacher, stage)
        self.objective = stage.objective
        if stage.objective == "auto":
            names = {cls.__name__ for cls in type(self.model).__mro__}
            self.objective = "logits" if names & OWN_HEADS else "features"
        self.measure, self.learning_rate = OBJECTIVES[self.objective]
        # The control: the error if every attention layer outputs 0.
        zeros = [(layer, Attention.zero) for layer in self.learning]
        with without_gradients():
            error, _ = self.measured(self.compared(batch, zeros))
        self.no_attention = float(ops.convert_to_numpy(error))

    def outputs(self, x):
        """Returns a list of `(output, real)` for each output that is compared."""
        model, backbone = self.model, getattr(self.model, "backbone", None)
        if self.objective == "features" and backbone is not None:
            model, names = backbone, getattr(backbone, "input", None)
            if isinstance(x, dict) and isinstance(names, dict):
                x = {name: x[name] for name in names}
        found = [
            (output, _real_tokens("".join(map(str, path)), output, x))
            for path, output in tree.flatten_with_path(model(x, training=False))
            if ops.is_tensor(output) and len(path) < 2
        ]
        if not found:
            raise ValueError(
                "Stage 'features' compares outputs of the model. Received: "
                f"{type(self.model).__name__}, whose output holds no tensor. Leave "
                "this stage out of `stages`."
            )
        return [pair for pair in found if len(pair[0].shape) == 3] or found

    def call(self, inputs):
        """Returns a list of `(wanted, given, real)`, one for each compared output."""
        noise, share = inputs["noise"], self.stage.window_dropout
        recorders = [
            (layer, _without_window(noise[0, i] < share))
            for i, layer in enumerate(self.learning)
            if layer.options.window is not None and share
        ]
        return self.compared(inputs, recorders)

    def compared(self, inputs, recorders):
        """Returns what `call` returns, while recorders answer for the linear layers."""
        wanted = self.teacher(self.outputs, inputs["x"])
        with recording(recorders):
            given = self.outputs(inputs["x"])
        pairs, weight = zip(wanted, given, strict=True), inputs.get("weight")
        return [(x, y, _weighted(real, weight)) for (x, real), (y, _) in pairs]

    def measured(self, compared):
        """Returns `(error, loss)`, each a mean over the compared outputs."""
        compare = _divergence if self.objective == "logits" else _distance
        errors, losses = zip(*(compare(*x) for x in compared), strict=True)
        return sum(errors) / len(errors), sum(losses) / len(losses)


def _real_tokens(name, output, x):
    """Returns 1 for the real tokens of an output, and 0 for padding."""
    prefix = name.partition("_sequence_output")[0]
    names = f"{prefix}_padding_mask", "padding_mask", "decoder_padding_mask"
    masks = [x[n] for n in names if n in x] if isinstance(x, dict) else []
    for mask in [*masks, getattr(output, "_keras_mask", None)]:
        has_tokens = mask is not None and len(output.shape) == 3
        if has_tokens and mask.shape[1] == output.shape[1]:
            return ops.cast(mask, "float32")
    return ops.ones_like(output[..., 0], dtype="float32")


def _weighted(real, weight):
    """Returns `real`, `(B, T)` or `(B,)`, times sample weights, `(B, T)` or `(B,)`."""
    if weight is None:
        return real
    if len(weight.shape) > len(real.shape):
        raise ValueError(
            "Sample weights must be `(B,)` for outputs without tokens. Received: "
            f"weights of shape {tuple(weight.shape)}. Leave them out."
        )
    shape = *ops.shape(weight), *(1,) * (len(real.shape) - len(weight.shape))
    return real * ops.reshape(ops.cast(weight, real.dtype), shape)


def _without_window(dropped):
    """Returns a recorder that leaves the window out if `dropped` is true."""
    return lambda call: ops.cond(dropped, call.without_window().linear, call.linear)


def _distance(wanted, given, real):
    """Returns the relative squared error, and the loss."""
    wanted, given = ops.cast(wanted, "float32"), ops.cast(given, "float32")
    squared = ops.sum(real * ops.sum(ops.square(given - wanted), axis=-1))
    norm = ops.sum(ops.square(wanted), axis=-1)
    error = squared / ops.maximum(ops.sum(real * norm), TINY)
    lengths = ops.sqrt(norm * ops.sum(ops.square(given), axis=-1) + TINY)
    cosine = ops.sum(real * ops.sum(wanted * given, axis=-1) / lengths)
    return error, error + 1 - cosine / ops.maximum(ops.sum(real), 1)


def _divergence(wanted, given, real):
    """Returns the mean Kullback-Leibler divergence of logits, as error and as loss."""
    wanted, given = (
        ops.log_softmax(ops.cast(x, "float32"), axis=-1) for x in (wanted, given)
    )
    by_token = ops.sum(ops.exp(wanted) * (wanted - given), axis=-1)
    mean = ops.sum(real * by_token) / ops.maximum(ops.sum(real), 1)
    return mean, mean
