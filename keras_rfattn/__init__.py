"""Linear attention for Keras 3, which replaces softmax attention in existing models."""

from keras_rfattn import diagnostics
from keras_rfattn import distribution
from keras_rfattn import feature_maps
from keras_rfattn import generation
from keras_rfattn import layers
from keras_rfattn import ops
from keras_rfattn import projections
from keras_rfattn.models import AttentionReport
from keras_rfattn.models import convert_vit
from keras_rfattn.models import describe_attention
from keras_rfattn.models import extend_positions
from keras_rfattn.models import from_preset
from keras_rfattn.models import replace_attention
from keras_rfattn.models import restore_attention
from keras_rfattn.models.import_hook import register
from keras_rfattn.models.import_hook import watch as _watch
from keras_rfattn.uptraining import CalibrateAfter
from keras_rfattn.uptraining import UptrainingReport
from keras_rfattn.uptraining import calibrate
from keras_rfattn.uptraining import uptrain

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
    "ops",
    "projections",
    "register",
    "replace_attention",
    "restore_attention",
    "uptrain",
]

_watch()
