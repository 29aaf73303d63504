"""Checks batches of data, and explains why a model refuses one."""

import sys

import keras
import numpy as np

# If several KerasHub preprocessors fit a model, errors name the one whose kind comes
# first here, because it produces the plain inputs of the model. `""` fits any kind.
KINDS = ("TextClassifier", "CausalLM", "Seq2SeqLM", "")


def check_batches(data):
    """Raises `ValueError` if `data` cannot be an iterable of batches."""
    reason = None
    if isinstance(data, dict):
        reason = f"{described(data)}, which is one batch. Put it into a list: `[data]`"
    elif is_text(data):
        reason = f"{described(data)}, which is text. Turn texts into tokens first"
    elif callable(data) and not hasattr(data, "__iter__"):
        reason = "a function. Call it, and pass the iterable that it returns"
    elif not hasattr(data, "__iter__") or getattr(data, "shape", None) == ():
        reason = f"data={data!r:.40} of type {type(data).__name__}"
    if reason is not None:
        raise ValueError(
            "`data` must be an iterable of batches for which `model(batch)` works. "
            f"Received: {reason}."
        )


def refusal(model, batch, error=None, data=None):
    """Returns a `ValueError` that says why a model did not run on a batch."""
    inputs = getattr(model, "input", None) if hasattr(model, "inputs") else None
    wanted = "an array" if inputs is None else described(inputs)
    received, hint = described(batch), too_long(model, batch)
    raised = ""
    if error is not None:
        text = f"{type(error).__name__}: {str(error).strip()}"
        raised = f" The model raised {text.removesuffix(': ')}."
    is_pair = isinstance(batch, tuple) and len(batch) in (2, 3)
    have_shapes = all(hasattr(x, "shape") for x in (data, inputs, batch))
    if any(map(is_text, keras.tree.flatten(batch))):
        hint = f"Turn texts into tokens first, {preprocessor_hint(model)}."
    elif hint:
        pass
    elif is_pair and inputs is not None and not isinstance(inputs, (list, tuple)):
        hint = "Remove labels and weights: the batch looks like (inputs, labels)."
    elif have_shapes and len(batch.shape) == len(inputs.shape) - 1:
        hint = (
            "The batch is one row of the array `data`. Put the array into a list, "
            "`[data]`, if the whole array is one batch."
        )
    if not hint and error is not None and _fits(inputs, batch):
        return ValueError(
            f"`model` must be able to run on each batch of `data`.{raised} The batch "
            f"was {received}."
        )
    return ValueError(
        f"Each batch of `data` must be an input of the model, {wanted}. Received: "
        f"{received}.{raised} {hint}".rstrip()
    )


def too_long(model, batch):
    """Returns advice for a batch with more tokens than the model has positions."""
    layers = model._flatten_layers()
    limits = (getattr(layer, "max_sequence_length", None) for layer in layers)
    limits = [x for x in limits if isinstance(x, int)]
    shapes = [getattr(x, "shape", ()) for x in keras.tree.flatten(batch)]
    lengths = [x[1] for x in shapes if len(x) == 2 and isinstance(x[1], int)]
    if not limits or not lengths or max(lengths) <= min(limits):
        return ""
    return (
        f"The batch has {max(lengths)} tokens, and the model has positions for "
        f"{min(limits)} (`max_sequence_length`). Cut the texts, or extend the model: "
        f"`keras_rfattn.extend_positions(model, {max(lengths)})`."
    )


def preprocessor_hint(model):
    """Returns text that names the KerasHub preprocessor or the tokenizer of a model."""
    if getattr(model, "preprocessor", None) is not None:
        return "as `model.preprocessor` does"
    name = _preprocessor_name(model)
    if name is None:
        return "with the model's tokenizer"
    return f"for example with `keras_hub.models.{name}`"


def _preprocessor_name(model):
    """Returns the name of the preprocessor class of a KerasHub model, or `None`."""
    hub = sys.modules.get("keras_hub")
    if hub is None:
        return None
    task = original_class(model)
    own = getattr(task, "preprocessor_cls", None)
    if own is not None:
        return own.__name__
    for layer in model._flatten_layers():
        cls = original_class(layer)
        names = [
            name
            for name, x in vars(hub.models).items()
            if isinstance(x, type)
            and issubclass(x, hub.models.Preprocessor)
            and x.backbone_cls is cls
            and "Masked" not in name
        ]
        for kind in KINDS:
            fitting = [name for name in names if kind in name]
            if fitting:
                return min(fitting)
    return None


def original_class(model):
    """Returns the class that a model had before its attention was replaced."""
    return getattr(type(model), "original_class", None) or type(model)


def is_text(x):
    """Whether x is a string, or an array that holds only strings."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "O":
        return all(isinstance(i, (str, bytes)) for i in x.flat)
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "US"
    return isinstance(x, (str, bytes)) or "string" in str(getattr(x, "dtype", ""))


def described(x):
    """Returns a short description of an object, for error messages."""
    if isinstance(x, dict):
        parts = (f"{key!r}: {described(value)}" for key, value in x.items())
        return "a dict of " + ", ".join(parts)
    if isinstance(x, (list, tuple)):
        kind = f"a {type(x).__name__} of {len(x)}"
        return f"{kind}: " + ", ".join(map(described, x[:3])) if x else "an empty list"
    if hasattr(x, "shape"):
        of_objects = " of objects" * (str(getattr(x, "dtype", "")) == "object")
        return f"an array{of_objects} of shape {tuple(x.shape)}"
    return f"{x!r:.40} of type {type(x).__name__}"


def _fits(inputs, batch):
    """Whether a batch has the names and shapes of a model's inputs."""
    if inputs is None:
        return True
    if isinstance(inputs, dict):
        if not isinstance(batch, dict) or set(inputs) - set(batch):
            return False
        batch = {name: batch[name] for name in inputs}
    wanted, given = keras.tree.flatten(inputs), keras.tree.flatten(batch)
    if len(wanted) != len(given):
        return False
    return all(
        len(a.shape) == len(getattr(b, "shape", ()))
        and all(n in (None, m) for n, m in zip(a.shape, b.shape, strict=True))
        for a, b in zip(wanted, given, strict=True)
    )
