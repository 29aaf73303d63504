"""Surgery on other people's models."""

from keras_rfattn.models.replace import replace_attention
from keras_rfattn.models.replace import restore_attention
from keras_rfattn.models.report import AttentionReport
from keras_rfattn.models.report import describe_attention

__all__ = [
    "AttentionReport",
    "describe_attention",
    "replace_attention",
    "restore_attention",
]
