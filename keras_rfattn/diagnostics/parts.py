"""Evaluates a metric of a model while parts of its attention are removed."""

from dataclasses import dataclass

from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import linear_layers, progress, recording
from keras_rfattn.models.holders import holders, refresh

ANSWERS = {
    "as_it_is": None,
    "window_only": Attention.window_alone,
    "features_only": Attention.features_alone,
    "mean_of_values": Attention.mean_of_values,
    "no_attention": Attention.zero,
    "softmax": Attention.softmax,
}


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
    around = holders(layers, model)
    metrics = {}
    for name in progress(ANSWERS, verbose):
        answers = dict.fromkeys(layers, ANSWERS[name])
        metrics[name] = _evaluated(model, data, metric, answers, around)
    return Attribution(**metrics)


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
