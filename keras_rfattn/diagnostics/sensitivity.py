"""Measures how much a metric depends on each attention layer or head."""

from dataclasses import dataclass
from typing import NamedTuple

from keras import ops

from keras_rfattn.diagnostics.attribute import answering, as_number, check_arguments
from keras_rfattn.feature_maps.arguments import is_integer
from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.models.survey import survey


class Part(NamedTuple):
    """The metric for an attention layer, or for one head of it.

    Attributes:
        path: Path of the layer.
        head: Index of a query head, or `None` for the whole layer.
        restored: Metric with softmax in this part and linear attention elsewhere.
        alone: Metric with linear attention in this part and softmax elsewhere.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> part = diagnostics.Part("layer", head=1, restored=0.9, alone=0.7)
        >>> part.path, part.head
        ('layer', 1)
    """

    path: str
    head: int | None
    restored: float
    alone: float


@dataclass(frozen=True)
class Sensitivity:
    """A metric of a model by parts of its attention; prints as a table.

    Attributes:
        as_it_is: Metric of the unchanged model.
        softmax: Metric with softmax attention everywhere and the current weights.
        parts: Tuple with a `Part` for each linear layer, or for each of its heads, in
            the order of the model.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> part = diagnostics.Part("layer", head=1, restored=0.9, alone=0.7)
        >>> result = diagnostics.Sensitivity(0.6, softmax=0.95, parts=(part,))
        >>> result.softmax_heads(1)
        {'layer': [1]}
    """

    as_it_is: float
    softmax: float
    parts: tuple

    def softmax_heads(self, count):
        """Selects the heads that, restored alone, bring the metric nearest to softmax.

        Args:
            count: Number of heads to select.

        Returns:
            Dict from layer paths to lists of head indices, which `replace_attention`
            takes as `softmax_heads`.

        Raises:
            ValueError: If the parts are layers (`heads=False`), or if there are fewer
                than `count` heads.
        """
        parts = [part for part in self.parts if part.head is not None]
        if not is_integer(count) or not 1 <= count <= len(parts):
            raise ValueError(
                f"`count` must be from 1 to the number of heads, {len(parts)}. "
                f"Received: count={count!r}. Heads are there with `heads=True`."
            )
        found = {}
        for part in sorted(parts, key=lambda x: abs(x.restored - self.softmax))[:count]:
            found.setdefault(part.path, []).append(part.head)
        return {path: sorted(heads) for path, heads in found.items()}

    def __str__(self):
        names = [
            part.path if part.head is None else f"{part.path}, head {part.head}"
            for part in self.parts
        ]
        width = max(len("layer"), *map(len, names))
        lines = [f"{'layer':<{width}}  softmax again  alone linear"]
        lines += [
            f"{name:<{width}}{part.restored:>15.4f}{part.alone:>14.4f}"
            for name, part in zip(names, self.parts, strict=True)
        ]
        lines.append(f"as it is {self.as_it_is:.4f}, softmax {self.softmax:.4f}")
        return "\n".join(lines)

    __repr__ = __str__


def sensitivity(model, data, metric, heads=False):
    """Evaluates a model with softmax restored in one part, and with one part linear.

    Errors of attention outputs do not show which parts matter for the final result.
    The sensitivity does: it shows which layers should be wider or stay softmax
    (`models.Plan`), and which heads should (`Sensitivity.softmax_heads`). It evaluates
    the metric twice for each part, and twice more.

    Args:
        model: A model with linear attention. It is unchanged afterwards.
        data: Data that is passed to `metric`.
        metric: A function `(model, data) -> number`. It must run `model` itself and
            must not generate text, as for `attribute`.
        heads: Whether a part is one head; by default it is a whole layer.

    Returns:
        A `Sensitivity`.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` is not callable.
        ValueError: If the model has no linear attention, or if `metric` generates or
            does not return a number.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> metric = lambda model, x: float(np.mean(model.predict_on_batch(x)))
        >>> result = diagnostics.sensitivity(model, x, metric, heads=True)
        >>> [part.head for part in result.parts]
        [0, 1]
    """
    layers = check_arguments(model, metric)
    sites = [site for site in survey(model).sites if site.is_linear]
    linear, softmax = dict.fromkeys(layers), dict.fromkeys(layers, Attention.softmax)

    def measured(answers):
        with answering(model, answers):
            return as_number(metric(model, data))

    parts = []
    for site in sites:
        for head in range(num_heads(site.layer)) if heads else (None,):
            restored = _within(head, Attention.softmax, Attention.linear)
            alone = _within(head, Attention.linear, Attention.softmax)
            parts.append(Part(
                site.path, head, measured({**linear, site.layer: restored}),
                measured({**softmax, site.layer: alone}),
            ))  # fmt: skip
    return Sensitivity(measured(linear), measured(softmax), tuple(parts))


def _within(head, answer, rest):
    """Returns a function that answers by `answer` for a head, by `rest` for others.

    If `head` is `None`, it answers by `answer` for all heads.
    """
    if head is None:
        return answer

    def mixed(call):
        is_head = ops.arange(call.query.shape[2])[:, None] == head
        return ops.where(is_head, answer(call), rest(call))

    return mixed
