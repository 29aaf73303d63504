"""Replaces attention in existing Keras models, and restores it."""

from keras_rfattn.models.gguf import from_gguf
from keras_rfattn.models.matching import Plan
from keras_rfattn.models.positions import extend_positions
from keras_rfattn.models.replace import replace_attention, restore_attention
from keras_rfattn.models.report import AttentionReport, describe_attention

__all__ = [
    "AttentionReport",
    "Plan",
    "describe_attention",
    "extend_positions",
    "from_gguf",
    "replace_attention",
    "restore_attention",
]
