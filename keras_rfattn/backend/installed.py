"""Imports Keras, whose error for a backend that is not installed gives no remedy."""

import importlib.util

BACKENDS = ("jax", "tensorflow", "torch")

try:
    import keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in BACKENDS:
        raise
    installed = [x for x in BACKENDS if x != error.name and importlib.util.find_spec(x)]
    use = (
        f"Use `export KERAS_BACKEND={installed[0]}` before Python starts, or set "
        "`os.environ` before the first import of Keras."
        if installed
        else "Use `pip install jax`, and `export KERAS_BACKEND=jax`."
    )
    raise ModuleNotFoundError(
        f"The backend of Keras must be installed. Received: backend={error.name!r} "
        f"(Keras' default is 'tensorflow'); installed: {installed}. {use}",
        name=error.name,
    ) from error
