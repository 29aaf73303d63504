"""Execution: operations whose best form depends on the backend or the device.

`common` has every operation, with its documentation. `jax`, `tensorflow` and `torch`
redefine those that need another form. Keras' backend is chosen once, so this file
chooses the operations once. No other folder, except `fused`, asks for the backend.
"""

import importlib
import types

# isort: split
import keras

from keras_rfattn.backend import common
from keras_rfattn.backend.sizes import fits, is_known, is_zero, product, smaller  # noqa: F401

try:
    _special = importlib.import_module(f"{__name__}.{keras.backend.backend()}")
except ModuleNotFoundError as error:
    # A backend of Keras without a file here uses `common` alone.
    if error.name != f"{__name__}.{keras.backend.backend()}":
        raise
    _special = types.SimpleNamespace()


globals().update(
    {
        name: getattr(_special, name, operation)
        for name, operation in vars(common).items()
        if getattr(operation, "__module__", None) == common.__name__
    }
)
