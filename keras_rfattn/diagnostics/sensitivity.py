"""Which attention layers or heads a metric suffers from."""

from dataclasses import dataclass
from typing import NamedTuple

from keras import ops

from keras_rfattn.diagnostics.attribute import answering
from keras_rfattn.diagnostics.attribute import as_number
from keras_rfattn.diagnostics.attribute import check_arguments
from keras_rfattn.feature_maps.arguments import is_integer
from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.models.survey import survey


class Part(NamedTuple):
    """An attention layer, or one head of it.

    Attributes:
        path: Of the layer.
        head: Index of a query head, or `None` for the layer.
        restored: The metric with this part softmax again and all else linear.
        alone: The metric with this part linear and all else softmax.
    """

    path: str
    head: int | None
    restored: float
    alone: float


@dataclass(frozen=True)
class Sensitivity:
    """A metric of a model by parts of its attention; prints as a table.

    Attributes:
        as_it_is: Of the model.
        softmax: With softmax attention by the weights that it has now.
        parts: A `Part` for each linear layer, or each head, in the order of the model.
    """

    as_it_is: float
    softmax: float
    parts: tuple

    def softmax_heads(self, count):
        """Those heads that bring the metric nearest to softmax's, each by itself.

        Args:
            count: How many.

        Returns:
            Dict from layer paths to lists of heads, as `replace_attention` takes it as
            `softmax_heads`.

        Raises:
            ValueError: If parts are layers (`heads=False`), or there are fewer.
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
    """Evaluates a model with one layer at a time softmax again, or alone linear.

    Errors of attention outputs do not tell what an answer needs; this does, and with it
    which layers to make wider or to keep softmax (`models.Plan`), and which heads
    (`Sensitivity.softmax_heads`). Evaluates the metric twice for each part, and twice
    more.

    Args:
        model: A model with linear attention; unchanged afterwards.
        data: What `metric` takes.
        metric: A function `(model, data) -> number`, as `attribute` takes it.
        heads: Whether each head is a part, not each layer.

    Returns:
        A `Sensitivity`.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` not callable.
        ValueError: If there is no linear attention.
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
    """One answer for a head, or for all, and another for the others."""
    if head is None:
        return answer

    def mixed(call):
        is_head = ops.arange(call.query.shape[2])[:, None] == head
        return ops.where(is_head, answer(call), rest(call))

    return mixed
