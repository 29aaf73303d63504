"""Attention layers whose cost is linear in sequence length."""

from keras_rfattn.layers.attend import attend
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.layers.multi_head_attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
)
from keras_rfattn.layers.recording import record

__all__ = [
    "GroupedQueryAttention",
    "LinearAttention",
    "MultiHeadAttention",
    "attend",
    "record",
]
