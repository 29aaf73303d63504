"""Checks batches of data, and says why a model did not run on one."""

import keras
import numpy as np


def check_batches(data):
    """Raises `ValueError` if `data` cannot be an iterable of batches."""
    is_iterable = hasattr(data, "__iter__") and getattr(data, "shape", None) != ()
    if isinstance(data, dict) or is_text(data) or not is_iterable:
        raise ValueError(
            "`data` must be an iterable of batches for which `model(batch)` works. "
            f"Received: {described(data)}. Put a single batch into a list, `[batch]`, "
            "call a function that makes batches, and turn texts into tokens first."
        )


def refusal(model, batch, error=None):
    """Returns a `ValueError` that says on what a model did not run."""
    inputs = getattr(model, "input", None) if hasattr(model, "inputs") else None
    wanted = "" if inputs is None else f", {described(inputs)}"
    raised, hint = "", "It has no labels; one array as a whole is the list `[array]`."
    if error is not None:
        raised = f" The model raised {type(error).__name__}: {str(error).strip()}"
    longest = max((x.shape[1] for x in _arrays(batch) if len(x.shape) == 2), default=0)
    layers = model._flatten_layers()
    limits = [getattr(layer, "max_sequence_length", None) for layer in layers]
    limit = min((x for x in limits if isinstance(x, int)), default=longest)
    if any(map(is_text, keras.tree.flatten(batch))):
        hint = "Turn texts into tokens first, by the model's preprocessor or tokenizer."
    elif longest > limit:
        hint = (
            f"The batch has {longest} tokens, and the model has positions for {limit} "
            "(`max_sequence_length`). Cut the texts, or extend the model: "
            f"`keras_rfattn.extend_positions(model, {longest})`."
        )
    return ValueError(
        f"Each batch of `data` must be an input of the model{wanted}. Received: "
        f"{described(batch)}.{raised} {hint}"
    )


def _arrays(batch):
    return [x for x in keras.tree.flatten(batch) if hasattr(x, "shape")]


def is_text(x):
    """Whether x is a string, or an array that holds only strings."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "O":
        return all(isinstance(i, (str, bytes)) for i in x.flat)
    dtype = str(getattr(x, "dtype", ""))
    return isinstance(x, (str, bytes)) or any(k in dtype for k in ("string", "U", "S"))


def described(x):
    """Returns the type of an object and the shapes in it, for error messages."""
    shapes = [tuple(a.shape) for a in _arrays(x)]
    names = f" of {', '.join(map(repr, x))}" if isinstance(x, dict) else ""
    kind = f"{type(x).__name__}{names}"
    return f"{kind} with shapes {shapes}" if shapes else f"{x!r:.80} of type {kind}"
