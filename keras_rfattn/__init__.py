"""Linear attention for Keras 3, which replaces softmax attention in existing models."""

import importlib

from keras_rfattn import feature_maps, layers, models, ops, projections
from keras_rfattn.maps import load_maps, pretrained_maps, save_maps, upload_maps
from keras_rfattn.models import (
    describe_attention,
    extend_positions,
    replace_attention,
    restore_attention,
)
from keras_rfattn.models.import_hook import register
from keras_rfattn.models.import_hook import watch as _watch
from keras_rfattn.uptraining import CalibrateAfter, calibrate, uptrain

__version__ = "0.1.0"

__all__ = [
    "CalibrateAfter",
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
    "upload_maps",
    "uptrain",
]

# Folders that are imported when they are first used.
LATER = ("diagnostics", "distribution", "experimental", "generation", "papers")


def __getattr__(name):
    if name in LATER:
        return importlib.import_module(f"keras_rfattn.{name}")
    raise AttributeError(f"module 'keras_rfattn' has no attribute {name!r}")


_watch()
