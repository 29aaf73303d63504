"""Linear attention for Keras 3, which replaces softmax attention in existing models."""

# Before all others, which import Keras too.
from keras_rfattn.backend import installed as _installed  # noqa: F401, I001
from keras_rfattn import (
    diagnostics,
    distribution,
    feature_maps,
    generation,
    layers,
    ops,
    projections,
)
from keras_rfattn.maps import load_maps, pretrained_maps, save_maps, upload_maps
from keras_rfattn.models import (
    AttentionReport,
    convert_vit,
    describe_attention,
    extend_positions,
    from_preset,
    replace_attention,
    restore_attention,
)
from keras_rfattn.models.import_hook import register
from keras_rfattn.models.import_hook import watch as _watch
from keras_rfattn.uptraining import CalibrateAfter, UptrainingReport, calibrate, uptrain

__version__ = "0.1.0"

__all__ = [
    "AttentionReport",
    "CalibrateAfter",
    "UptrainingReport",
    "calibrate",
    "convert_vit",
    "describe_attention",
    "diagnostics",
    "distribution",
    "extend_positions",
    "feature_maps",
    "from_preset",
    "generation",
    "layers",
    "load_maps",
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

_watch()
