"""Finds the key/value heads that need softmax: `select_heads`.

A linear layer forgets, because its state has a fixed size. A model looks far back with
few of its heads, which "DuoAttention" (Xiao et al., 2024) finds by training a gate for
each head between full attention and a window. Here each gate mixes softmax with the
attention that the layer really has, and nothing trains: the score of a head is the
integral of the derivative of the loss by its gate, while all gates open together
("Axiomatic Attribution for Deep Networks", Sundararajan et al., 2017).
"""

import itertools
import time
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_rfattn.arguments import check_choice, check_seed, check_sizes, is_positive
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import in_order, linear_layers, progress
from keras_rfattn.models.survey import survey
from keras_rfattn.uptraining.batches import Batches
from keras_rfattn.uptraining.features import TINY, FeaturesStage
from keras_rfattn.uptraining.head_selection import HeadSelection
from keras_rfattn.uptraining.uptrain import Stage
from keras_rfattn.uptraining.weights import Teacher, only_training

# Openings of the gates at which the derivative is computed, for an integral by
# midpoints. At 1, all of the divergence's derivatives are 0.
OPENINGS = 0.125, 0.375, 0.625, 0.875
# Factor on the loss, without which small gradients would be 0 in float16.
LOSS_SCALE = 4096.0
# Attention of the heads that do not stay softmax, by the argument `others`.
OTHERS = {
    "linear": Attention.linear,
    "window": Attention.window_alone,
    "zero": Attention.zero,
}


def select_heads(
    model: keras.layers.Layer,
    data: Any,
    share: float = 0.2,
    *,
    answers: Any = None,
    answers_weight: float = 1.0,
    steps: int = 4,
    batch_size: int = 1,
    others: str = "linear",
    seed: int = 0,
    verbose: int | str = "auto",
) -> HeadSelection:
    """Selects the key/value heads of a linear model that should stay softmax.

    It compares the model with its softmax checkpoint (logits of language models, last
    hidden states of others) while all key/value heads pass from one to the other, and
    scores how much each head contributes. The model is unchanged: pass the selection to
    `restore_attention` or `replace_attention`.

    Args:
        model: A model changed by `replace_attention` or `load_maps`, with the window,
            sinks and maps that its other heads will have.
        data: Data as for `uptrain`, such as texts. Labels are ignored, and sample
            weights `(B, T)` weigh the tokens whose outputs are compared.
        share: Share of all key/value heads to select, between 0 and 1.
        answers: Data of a second kind, in which few tokens need a long memory, such as
            `uptraining.recall_rows` makes. Without them, heads that look up a single
            token count little, because few tokens of a text need them.
        answers_weight: Factor on the scores from `answers`, after the scores from each
            kind of data are divided by their sum.
        steps: Number of batches of each kind.
        batch_size: Number of rows per batch, as in `uptrain`.
        others: What all other heads compute: `"linear"`, what the layers compute now;
            `"window"`, their window and sinks alone; or `"zero"`.
        seed: Non-negative integer that orders the data.
        verbose: 0, 1, 2 or `"auto"`, as in Keras.

    Returns:
        A `HeadSelection`, a dict from paths of layers to lists of heads.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no linear attention, or the
            data do not fit it.
    """
    start = time.perf_counter()
    check_model(model)
    check_sizes(steps=steps, batch_size=batch_size)
    check_choice("others", others, tuple(OTHERS))
    check_seed(seed)
    HeadSelection({}, share)  # checks `share`
    if not is_positive(answers_weight):
        raise ValueError(
            "`answers_weight` must be a positive number. Received: "
            f"answers_weight={answers_weight!r}."
        )
    layers = linear_layers(model)
    if not layers:
        raise ValueError(
            f"`model` has no linear attention. Received: {title(model)}. Call "
            "`replace_attention` or `load_maps` first."
        )
    kinds = {"data": data} | ({} if answers is None else {"answers": answers})
    preprocessor = getattr(model, "preprocessor", None)
    batches = {
        kind: Batches(x, batch_size, seed, preprocessor) for kind, x in kinds.items()
    }
    layers = in_order(model, layers, batches["data"](0))
    stage, teacher = Stage("features"), Teacher(model, layers, [])
    first = batches["data"].weighted(0)
    gated = GatedModel(teacher, stage, first, OTHERS[others])
    paths = {id(site.layer): site.path for site in survey(model)}
    names = [paths[id(layer)] for layer in layers]
    with only_training(model, []):
        scores = [in_percent(gated.scores(x, steps, verbose)) for x in batches.values()]
    total = in_percent(scores[0] + sum(answers_weight * x for x in scores[1:]))
    total, *parts = (
        dict(zip(names, gated.by_layer(x.tolist()), strict=True))
        for x in (total, *scores)
    )
    details, seconds = dict(zip(kinds, parts, strict=True)), time.perf_counter() - start
    return HeadSelection(total, float(share), details, seconds)


def in_percent(scores):
    """Returns scores in percent of the sum of those that are positive."""
    return 100 * scores / max(np.maximum(scores, 0).sum(), TINY)


class GatedModel(FeaturesStage):
    """A model whose key/value heads mix softmax with other attention, by gates."""

    def __init__(self, teacher, stage, batch, other):
        super().__init__(teacher, stage, batch)
        self.other = other
        counts = [layer._kv_shape()[0] for layer in self.learning]
        self.ends = np.cumsum(counts).tolist()
        # How much wider than all others a gate is open; nothing changes it.
        self.gates = self.add_weight(
            shape=(sum(counts),), initializer="zeros", name="gates"
        )

    def call(self, inputs):
        """Returns `(wanted, given, weight)` of each compared output."""
        gates = self.by_layer(inputs["opening"][0] + self.gates)
        recorders = [
            (layer, self._mixed(gate))
            for layer, gate in zip(self.learning, gates, strict=True)
        ]
        return self.compared(inputs, recorders)

    def _mixed(self, gate):
        """Returns a function that mixes softmax with the other attention."""

        def mixed(call):
            groups = call.query.shape[2] // call.key.shape[2]
            # Half precision cannot sum the gradients of many tokens.
            openings = ops.repeat(gate, groups)[:, None]
            softmax = ops.cast(call.softmax(), openings.dtype)
            other = ops.cast(self.other(call), openings.dtype)
            output = openings * softmax + (1 - openings) * other
            return ops.cast(output, call.value.dtype)

        # Heads that are softmax already get scores too.
        mixed.answers_all_heads = True
        return mixed

    def compute_loss(self, *args, **kwargs):
        return LOSS_SCALE * super().compute_loss(*args, **kwargs)

    def scores(self, batches, steps, verbose):
        """Returns the scores of all key/value heads, one layer after the other."""
        self.compile(GradientSum())
        self.optimizer.build([self.gates])
        for step in progress(range(steps), verbose):
            batch = batches.weighted(step)
            rows = len(keras.tree.flatten(batch["x"])[0])
            for opening in OPENINGS:
                opening = np.full((rows,), opening, "float32")
                self.train_on_batch({**batch, "opening": opening})
        sums = ops.convert_to_numpy(self.optimizer.sums[0])
        scores = -sums / (LOSS_SCALE * steps * len(OPENINGS))
        if not np.all(np.isfinite(scores)):
            raise ValueError(
                "The losses of `data` must be finite. Received: scores of heads that "
                "are not. Look for NaN in the data and in the weights of the model."
            )
        return scores

    def by_layer(self, x):
        """Returns a list of the parts of an array that belong to each layer."""
        starts = [0, *self.ends]
        return [x[start:end] for start, end in itertools.pairwise(starts)]


class GradientSum(keras.optimizers.Optimizer):
    """An optimizer that adds gradients up, and changes no variable."""

    def __init__(self):
        super().__init__(learning_rate=1.0, name="gradient_sum")

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.sums = [self.add_variable_from_reference(x, "sum") for x in variables]

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        self.assign_add(self.sums[index], ops.cast(gradient, variable.dtype))
