"""Evaluates a metric of a model while parts of its attention are replaced.

`attribute` replaces the window or the features of all layers; `sensitivity` replaces
the attention of one layer or head.
"""

from dataclasses import dataclass
from typing import NamedTuple

from keras import ops

from keras_rfattn.arguments import is_integer
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import linear_layers, progress, recording
from keras_rfattn.models.holders import holders, refresh
from keras_rfattn.models.survey import survey

ANSWERS = {
    "as_it_is": None,
    "window_only": Attention.window_alone,
    "features_only": Attention.features_alone,
    "mean_of_values": Attention.mean_of_values,
    "no_attention": Attention.zero,
    "softmax": Attention.softmax,
}
# Without any window, the metric of each key equals that of its value.
WITHOUT_WINDOWS = {"window_only": "no_attention", "features_only": "as_it_is"}


@dataclass(frozen=True)
class Attribution:
    """A metric of a model, evaluated in six ways; prints as a table.

    Attributes:
        as_it_is: Metric of the unchanged model.
        window_only: Metric with only the exact attention to windows and sinks. Layers
            without a window output 0.
        features_only: Metric with features for all keys, without windows and sinks.
        mean_of_values: Metric with uniform attention.
        no_attention: Metric with attention that outputs 0.
        softmax: Metric with softmax attention and the current weights.
    """

    as_it_is: float
    window_only: float
    features_only: float
    mean_of_values: float
    no_attention: float
    softmax: float

    @property
    def share_of_features(self):
        """The share of the gap from window-only to softmax that is closed, or NaN."""
        gap = self.softmax - self.window_only
        return (self.as_it_is - self.window_only) / gap if gap else float("nan")

    def __str__(self):
        lines = [
            f"{name.replace('_', ' '):<16}{value:>10.4f}"
            for name, value in vars(self).items()
        ]
        lines.append(
            f"features carry {self.share_of_features:.0%} of the way from "
            "window-only to softmax"
        )
        return "\n".join(lines)

    __repr__ = __str__


def attribute(model, data, metric, verbose="auto"):
    """Evaluates a model as it is, and with parts of its attention removed.

    A converted model with a window may owe its quality to the window alone. The
    attribution shows whether its features contribute.

    Args:
        model: A model with linear attention. It is unchanged afterwards.
        data: Data that is passed to `metric`.
        metric: A function `(model, data) -> number`. It must run `model` itself:
            functions compiled for other models that share its layers ignore the
            change. It must not generate text, because generation uses features only.
        verbose: 0, 1, 2 or `"auto"`, as in Keras.

    Returns:
        An `Attribution`.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` is not callable.
        ValueError: If the model has no linear attention, or if `metric` generates or
            does not return a number.
    """
    layers = _check_arguments(model, metric)
    around = holders(layers, model)
    has_windows = any(layer.options.window is not None for layer in layers)
    skipped = {} if has_windows else WITHOUT_WINDOWS
    metrics = {}
    for name in progress([x for x in ANSWERS if x not in skipped], verbose):
        answers = dict.fromkeys(layers, ANSWERS[name])
        metrics[name] = _evaluated(model, data, metric, answers, around)
    for name, same in skipped.items():
        metrics[name] = metrics[same]
    return Attribution(**metrics)


class Part(NamedTuple):
    """The metric for an attention layer, or for one head of it.

    Attributes:
        path: Path of the layer.
        head: Index of a key/value head, which stands for the query heads that read it,
            or `None` for the whole layer.
        restored: Metric with softmax in this part and linear attention elsewhere.
        alone: Metric with linear attention in this part and softmax elsewhere.
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
    """

    as_it_is: float
    softmax: float
    parts: tuple

    def softmax_heads(self, count):
        """Selects the heads that, restored alone, bring the metric nearest to softmax.

        Args:
            count: Number of heads to select.

        Returns:
            Dict from layer paths to lists of indices of key/value heads, the option
            `softmax_heads` of these layers in a `models.Plan`.

        Raises:
            ValueError: If the parts are layers (`heads=False`), or if there are fewer
                than `count` heads.
        """
        parts = self._parts(count, heads=True)
        nearest = sorted(parts, key=lambda part: abs(part.restored - self.softmax))
        by_layer = {}
        for part in nearest[:count]:
            by_layer.setdefault(part.path, []).append(part.head)
        return {path: sorted(heads) for path, heads in by_layer.items()}

    def softmax_layers(self, count):
        """Selects the layers that move the metric most if they alone are linear.

        Args:
            count: Number of layers to select.

        Returns:
            List of layer paths in the order of the model, which `replace_attention`
            takes as `exclude`.

        Raises:
            ValueError: If the parts are heads (`heads=True`), or if there are fewer
                than `count` layers.
        """
        parts = self._parts(count, heads=False)
        order = sorted(parts, key=lambda part: -abs(part.alone - self.softmax))
        chosen = {part.path for part in order[:count]}
        return [part.path for part in parts if part.path in chosen]

    def _parts(self, count, heads):
        """Returns the parts that are heads, or layers, if there are `count` of them."""
        parts = [part for part in self.parts if (part.head is not None) == heads]
        if not is_integer(count) or not 1 <= count <= len(parts):
            kind = "heads" if heads else "layers"
            raise ValueError(
                f"`count` must be from 1 to the number of {kind}, {len(parts)}. "
                f"Received: count={count!r}. Use `sensitivity(..., heads={heads})` to "
                f"evaluate {kind}."
            )
        return parts

    def __str__(self):
        names = [
            part.path if part.head is None else f"{part.path}, head {part.head}"
            for part in self.parts
        ]
        width = max(len("layer"), *map(len, names))
        lines = [f"{'layer':<{width}}   only softmax   only linear"]
        lines += [
            f"{name:<{width}}{part.restored:>15.4f}{part.alone:>14.4f}"
            for name, part in zip(names, self.parts, strict=True)
        ]
        lines.append(f"as it is {self.as_it_is:.4f}, softmax {self.softmax:.4f}")
        return "\n".join(lines)

    __repr__ = __str__


def sensitivity(model, data, metric, heads=False, verbose="auto"):
    """Evaluates a model with softmax restored in one part, and with one part linear.

    Errors of attention outputs do not show which parts matter for the final result.
    The sensitivity does: it shows which layers should be wider or stay softmax
    (`Sensitivity.softmax_layers`, `models.Plan`), and which heads should
    (`Sensitivity.softmax_heads`). It evaluates the metric twice for each part, and
    twice more.

    Args:
        model: A model with linear attention. It is unchanged afterwards.
        data: Data that is passed to `metric`.
        metric: A function `(model, data) -> number`. It must run `model` itself and
            must not generate text, as for `attribute`.
        heads: Whether a part is one key/value head with its query heads; by default it
            is a whole layer.
        verbose: 0, 1, 2 or `"auto"`, as in Keras.

    Returns:
        A `Sensitivity`.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` is not callable.
        ValueError: If the model has no linear attention, or if `metric` generates or
            does not return a number.
    """
    layers = _check_arguments(model, metric)
    around = holders(layers, model)
    sites = [site for site in survey(model) if site.is_linear]
    linear, softmax = dict.fromkeys(layers), dict.fromkeys(layers, Attention.softmax)

    def evaluated(answers):
        return _evaluated(model, data, metric, answers, around)

    pairs = [
        (site, head)
        for site in sites
        for head in (range(site.layer.feature_map.num_heads) if heads else (None,))
    ]
    parts = []
    for site, head in progress(pairs, verbose):
        restored = _within(head, Attention.softmax, Attention.linear)
        alone = _within(head, Attention.linear, Attention.softmax)
        part = Part(
            site.path,
            head,
            restored=evaluated({**linear, site.layer: restored}),
            alone=evaluated({**softmax, site.layer: alone}),
        )
        parts.append(part)
    return Sensitivity(evaluated(linear), evaluated(softmax), tuple(parts))


def _within(head, answer, rest):
    """Returns a function that answers by `answer` for a key/value head, else `rest`."""
    if head is None:
        return answer

    def mixed(call):
        groups = call.query.shape[2] // call.key.shape[2]
        is_head = ops.arange(call.query.shape[2])[:, None] // groups == head
        return ops.where(is_head, answer(call), rest(call))

    return mixed


def _check_arguments(model, metric):
    """Returns the linear attention layers of a model that a metric evaluates."""
    check_model(model)
    if not callable(metric):
        raise TypeError(
            "`metric` must be a function `(model, data) -> number`. "
            f"Received: metric={metric!r}."
        )
    layers = linear_layers(model)
    if not layers:
        raise ValueError(
            f"`model` has no linear attention. Received: {title(model)}. Call "
            "`replace_attention(model)` first."
        )
    return layers


def _evaluated(model, data, metric, answers, around):
    """Returns a metric while layers compute their attention by given functions."""
    try:
        with recording(answers.items()):
            _refresh(around)
            result = metric(model, data)
    finally:
        _refresh(around)
    try:
        return float(result)
    except (TypeError, ValueError):
        raise ValueError(
            "`metric` must return a number. Received: "
            f"{result!r:.80} of type {type(result).__name__}."
        ) from None


def _refresh(around):
    for holder in around:
        refresh(holder)
