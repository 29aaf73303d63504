"""Attributes the quality of a model to the window and to the features."""

import contextlib
from dataclasses import dataclass

from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.holders import holders, refresh

ANSWERS = {
    "as_it_is": None,
    "window_only": Attention.window_alone,
    "features_only": lambda call: call.without_window().linear(),
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
        window_only: Metric with only the exact attention inside the windows. Layers
            without a window output 0.
        features_only: Metric with features for all keys, without windows.
        mean_of_values: Metric with uniform attention.
        no_attention: Metric with attention that outputs 0.
        softmax: Metric with softmax attention and the current weights.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> result = diagnostics.Attribution(
        ...     as_it_is=0.9, window_only=0.7, features_only=0.8, mean_of_values=0.5,
        ...     no_attention=0.4, softmax=0.95)
        >>> print(result)
        as it is            0.9000
        window only         0.7000
        features only       0.8000
        mean of values      0.5000
        no attention        0.4000
        softmax             0.9500
        features carry 80% of the way from window-only to softmax
    """

    as_it_is: float
    window_only: float
    features_only: float
    mean_of_values: float
    no_attention: float
    softmax: float

    @property
    def share_of_features(self):
        """The share of the gap between window-only and softmax that the model closes.

        It is NaN if there is no gap.
        """
        gap = self.softmax - self.window_only
        return (self.as_it_is - self.window_only) / gap if gap else float("nan")

    def __str__(self):
        lines = [
            f"{name.replace('_', ' '):<16}{value:>10.4f}"
            for name, value in vars(self).items()
        ]
        lines.append(f"features carry {self.share_of_features:.0%} of the way from "
                     "window-only to softmax")  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__


def attribute(model, data, metric):
    """Evaluates a model as it is, and with parts of its attention removed.

    A converted model with a window may owe its quality to the window alone. The
    attribution shows whether its features contribute.

    Args:
        model: A model with linear attention. It is unchanged afterwards.
        data: Data that is passed to `metric`.
        metric: A function `(model, data) -> number`. It must run `model` itself:
            functions compiled for other models that share its layers ignore the
            change. It must not generate text, because generation uses features only.

    Returns:
        An `Attribution`.

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
        >>> result = diagnostics.attribute(model, x, metric)
        >>> result.as_it_is == metric(model, x)
        True
    """
    layers = check_arguments(model, metric)
    has_windows = any(layer.options.window is not None for layer in layers)
    found = {}
    for name, answer in ANSWERS.items():
        same = None if has_windows else WITHOUT_WINDOWS.get(name)
        if same is None:
            with answering(model, dict.fromkeys(layers, answer)):
                found[name] = as_number(metric(model, data))
    for name, same in WITHOUT_WINDOWS.items():
        found.setdefault(name, found[same])
    return Attribution(**found)


def check_arguments(model, metric):
    """Returns the linear attention layers of a model that a metric evaluates.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` is not callable.
        ValueError: If the model has no linear attention.
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
    return layers


def as_number(found):
    """Converts the result of a metric to a float, or raises `ValueError`."""
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ValueError(
            "`metric` must return a number. Received: "
            f"{found!r:.80} of type {type(found).__name__}."
        ) from None


@contextlib.contextmanager
def answering(model, answers):
    """Context manager in which layers compute their attention by given functions.

    Args:
        model: The model that holds the layers.
        answers: Dict from layers to functions that take an `Attention` and return its
            output; with `None`, a layer computes its own attention.
    """

    def set_recorders(found):
        for layer, answer in found.items():
            layer.recorder = answer
        for layer in holders(found):
            refresh(layer)

    try:
        set_recorders(answers)
        yield
    finally:
        set_recorders(dict.fromkeys(answers))
