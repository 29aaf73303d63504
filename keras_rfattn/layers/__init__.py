"""Attention layers that are linear in sequence length."""

from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.attention import attend
from keras_rfattn.layers.grouped_query_attention import GroupedQueryAttention
from keras_rfattn.layers.multi_head_attention import MultiHeadAttention

__all__ = [
    "GroupedQueryAttention",
    "LinearAttention",
    "MultiHeadAttention",
    "attend",
]
