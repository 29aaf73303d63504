"""Surgery on other people's models."""

from keras_rfattn.models.decoder import transformer_pp
from keras_rfattn.models.keras_cv import convert_vit
from keras_rfattn.models.positions import extend_positions
from keras_rfattn.models.presets import from_preset
from keras_rfattn.models.replace import replace_attention
from keras_rfattn.models.replace import restore_attention
from keras_rfattn.models.report import AttentionReport
from keras_rfattn.models.report import describe_attention

__all__ = [
    "AttentionReport",
    "convert_vit",
    "describe_attention",
    "extend_positions",
    "from_preset",
    "replace_attention",
    "restore_attention",
    "transformer_pp",
]
