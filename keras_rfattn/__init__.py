"""Linear attention for Keras 3, which replaces softmax attention in existing models."""

import importlib

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    _backend = str(error.name).split(".")[0]
    if _backend not in ("jax", "tensorflow", "torch"):
        raise
    raise ModuleNotFoundError(
        f"Keras' backend {_backend!r} must be installed. Set the environment "
        "variable KERAS_BACKEND to 'jax', 'tensorflow' or 'torch', whichever is "
        "installed, before Python starts; its default is 'tensorflow'.",
        name=error.name,
    ) from error

from keras_rfattn import feature_maps, generation, layers, models, ops, projections
from keras_rfattn.maps import load_maps, pretrained_maps, save_maps
from keras_rfattn.models import (
    describe_attention,
    extend_positions,
    replace_attention,
    restore_attention,
)
from keras_rfattn.models.import_hook import register
from keras_rfattn.models.import_hook import watch as _watch
from keras_rfattn.uptraining import calibrate, select_heads, uptrain

__version__ = "0.1.0"

__all__ = [
    "calibrate",
    "describe_attention",
    "diagnostics",
    "distribution",
    "extend_positions",
    "feature_maps",
    "generation",
    "layers",
    "load_maps",
    "models",
    "ops",
    "pretrained_maps",
    "projections",
    "register",
    "replace_attention",
    "restore_attention",
    "save_maps",
    "select_heads",
    "uptrain",
]

# Folders that are imported when they are first used.
LATER = ("diagnostics", "distribution", "experimental", "papers")


def __getattr__(name):
    if name in LATER:
        return importlib.import_module(f"keras_rfattn.{name}")
    raise AttributeError(f"module 'keras_rfattn' has no attribute {name!r}")


_watch()
