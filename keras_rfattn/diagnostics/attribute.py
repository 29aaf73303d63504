"""What of a model's quality its window has, and what its features."""

import contextlib
from dataclasses import dataclass

from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.checks import check_model
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.holders import holders
from keras_rfattn.models.holders import refresh

ANSWERS = {
    "as_it_is": None,
    "window_only": Attention.window_alone,
    "features_only": lambda call: call.without_window().linear(),
    "mean_of_values": Attention.mean_of_values,
    "no_attention": Attention.zero,
    "softmax": Attention.softmax,
}
# What these equal where no layer has a window.
WITHOUT_WINDOWS = {"window_only": "no_attention", "features_only": "as_it_is"}


@dataclass(frozen=True)
class Attribution:
    """A metric of a model, evaluated in six ways; prints as a table.

    Attributes:
        as_it_is: Of the model.
        window_only: With the exact attention of its windows alone; without a window
            that is no attention.
        features_only: With features for all keys.
        mean_of_values: With uniform attention.
        no_attention: With attention that puts out 0.
        softmax: With softmax attention by the weights that it has now.
    """

    as_it_is: float
    window_only: float
    features_only: float
    mean_of_values: float
    no_attention: float
    softmax: float

    @property
    def share_of_features(self):
        """Of what lies between window-only and softmax, the part the model reaches."""
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
    """Evaluates a model as it is, and with parts of its attention taken away.

    A converted model with a window may live on the window alone; this tells.

    Args:
        model: A model with linear attention; unchanged afterwards.
        data: What `metric` takes.
        metric: A function `(model, data) -> number`. It must run `model` itself, as
            functions compiled for others that share its layers do not notice, and not
            generate, which is by features alone.

    Returns:
        An `Attribution`.

    Raises:
        TypeError: If `model` is not a Keras layer, or `metric` not callable.
        ValueError: If there is no linear attention, or `metric` generates or does not
            return a number.
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
    """The linear attention layers of a model that a metric is to judge."""
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
    """What a metric returned, as a float."""
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ValueError(
            "`metric` must return a number. Received: "
            f"{found!r:.80} of type {type(found).__name__}."
        ) from None


@contextlib.contextmanager
def answering(model, answers):
    """Layers answer by functions of an `Attention` meanwhile, `None` as they do."""

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
