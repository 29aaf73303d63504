"""Stage "features": trains the linear model end to end against the softmax model.

Errors of layers that learn side by side accumulate over depth. This stage therefore
compares the last hidden states, by relative squared error and by cosine (as in the
second stage of "ViT-AdaLA"), or the logits of a model with a head, by their
Kullback-Leibler divergence (as in the second step of "RADLADS"). A causal language
model can learn from the next tokens of its data instead, with a little of that
divergence.
"""

from keras import ops, tree

from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey
from keras_rfattn.uptraining.weights import StageModel

TINY = 1e-9
# KerasHub tasks whose head is part of the checkpoint.
OWN_HEADS = {"CausalLM", "MaskedLM", "Seq2SeqLM"}
# Share of the divergence in the loss of "next_token", and the number of softmax's
# largest logits that it compares. All others together would double the memory.
DIVERGENCE, LARGEST = 0.1, 256


class FeaturesStage(StageModel):
    """Trains the model end to end by comparing its final outputs with the teacher's."""

    def __init__(self, teacher, stage, batch):
        super().__init__(teacher, stage)
        self.objective = stage.objective
        names = {cls.__name__ for cls in type(self.model).__mro__}
        if stage.objective == "auto":
            self.objective = "logits" if names & OWN_HEADS else "features"
        is_decoder = "CausalLM" in names and "Seq2SeqLM" not in names
        has_prefix = any(site.has_prefix for site in survey(self.model))
        if stage.objective == "next_token" and (not is_decoder or has_prefix):
            raise ValueError(
                "Objective 'next_token' needs a `CausalLM` of KerasHub in which tokens "
                f"see earlier ones alone. Received: {title(self.model)}. Use 'logits'."
            )
        self.compare, self.measure, self.learning_rate = OBJECTIVES[self.objective]
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
        ids = [inputs["x"]] if self.objective == "next_token" else []
        return [(x, y, _weighted(real, weight), *ids) for (x, real), (y, _) in pairs]

    def measured(self, compared):
        """Returns `(error, loss)`, each a mean over the compared outputs."""
        errors, losses = zip(*(self.compare(*x) for x in compared), strict=True)
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


def _prediction(wanted, given, real, x):
    """Returns the divergence of logits, and the loss of the tokens that follow."""
    error, _ = _divergence(wanted, ops.stop_gradient(given), real)
    wanted, largest = ops.top_k(wanted, min(LARGEST, wanted.shape[-1]))
    among = ops.take_along_axis(given, largest, axis=-1)
    divergence, _ = _divergence(wanted, among, real)
    # The weight of a token is that of its prediction; padding is not predicted.
    follows = ops.cast(x["padding_mask"][:, 1:], "float32") * real[:, :-1]
    targets = ops.cast(x["token_ids"][:, 1:], "int32")
    logits = ops.cast(given[:, :-1], "float32")
    entropy = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    entropy = ops.sum(follows * entropy) / ops.maximum(ops.sum(follows), 1)
    return error, (1 - DIVERGENCE) * entropy + DIVERGENCE * divergence


# Objective -> comparison, measure that a stage reports, and learning rate of the maps.
OBJECTIVES = {
    "features": (_distance, "relative squared error of the model's outputs", 0.005),
    "logits": (_divergence, "divergence of logits", 0.001),
    "next_token": (_prediction, "divergence of logits", 0.001),
}
