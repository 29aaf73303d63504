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
    if any(map(is_text, keras.tree.flatten(batch))):
        hint = "Turn texts into tokens first, by the model's preprocessor or tokenizer."
    return ValueError(
        f"Each batch of `data` must be an input of the model{wanted}. Received: "
        f"{described(batch)}.{raised} {hint}"
    )


def is_text(x):
    """Whether x is a string, or an array that holds only strings."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "O":
        return all(isinstance(i, (str, bytes)) for i in x.flat)
    dtype = str(getattr(x, "dtype", ""))
    return isinstance(x, (str, bytes)) or any(k in dtype for k in ("string", "U", "S"))


def described(x):
    """Returns the type of an object and the shapes in it, for error messages."""
    shapes = [tuple(a.shape) for a in keras.tree.flatten(x) if hasattr(a, "shape")]
    names = f" of {', '.join(map(repr, x))}" if isinstance(x, dict) else ""
    kind = f"{type(x).__name__}{names}"
    return f"{kind} with shapes {shapes}" if shapes else f"{x!r:.80} of type {kind}"
