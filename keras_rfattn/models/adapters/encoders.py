"""Mixins for KerasHub's encoder attention that computes softmax inside `call`.

They differ from those in `mixins`: they define a new `call`, which uses the projections
of the original class.
"""

import keras

from keras_rfattn.layers.checks import projection
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.ops.masks import AttentionMask, interpret_mask


class EncoderAttention(LinearAttention):
    """Splits tokens into heads, and joins heads, for the mixins below."""

    def _kv_shape(self):
        return self.num_heads, self.head_dim

    def _split(self, x, **kwargs):
        """Returns queries, keys and values `(B, T, N, H)` of tokens `(B, T, D)`."""
        shape = *keras.ops.shape(x)[:2], *self._kv_shape()
        return [
            keras.ops.reshape(projection(self, side)(x, **kwargs), shape)
            for side in ("query", "key", "value")
        ]

    def _joined(self, *args):
        """Computes attention, and returns the heads side by side, `(B, T, N H)`."""
        output, _ = self._compute_attention(*args)
        return keras.ops.reshape(output, (*keras.ops.shape(output)[:2], -1))


class RoformerAttention(EncoderAttention):
    """Mixin for RoFormer V2's attention, which computes softmax inside `call`."""

    def _kv_shape(self):
        return self.heads, self.head_size

    def _turned(self, query, key):
        return self.rotary_embedding_layer([query, key])

    def call(self, x, attention_mask=None):
        """Maps `(B, T, D)` to `(B, T, D)`; `attention_mask` `(B, T)` hides keys."""
        query, key, value = self._split(x)
        query, key = self._turned(query, key)
        mask = AttentionMask(self_attention=True)
        if attention_mask is not None:
            visible = keras.ops.cast(attention_mask, "bool")
            visible = keras.ops.reshape(visible, keras.ops.shape(x)[:2])
            mask = mask.replace(key_mask=visible)
        return self.o_dense(self._joined(query, key, value, mask))


class EsmAttention(RoformerAttention):
    """Mixin for ESM's attention, which has another rotary embedding or none."""

    def _turned(self, query, key):
        if not self.use_rotary:
            return query, key
        return self.rotary_embedding_layer(query, key)


class PaliGemmaVitAttention(EncoderAttention):
    """Mixin for PaliGemma's image attention, which computes softmax inside `call`."""

    def call(
        self, x, attention_mask=None, return_attention_scores=None, training=False
    ):
        """Maps `(B, T, D)` to `((B, T, D), None)`; the original also returns scores."""
        mask = interpret_mask(attention_mask, x.shape[1], x.shape[1])
        mask = mask.replace(self_attention=True)
        output = self._joined(*self._split(x), mask, training, return_attention_scores)
        return self.out_proj(output, training=training), None


class DINOV3Attention(EncoderAttention):
    """Mixin for DINOv3's attention, which computes softmax inside `call`."""

    def call(
        self,
        inputs,
        attention_mask=None,
        position_embeddings=None,
        num_prefix_tokens=0,
        training=None,
    ):
        """Maps `(B, T, D)` to `(B, T, D)`."""
        query, key, value = self._split(inputs, training=training)
        if position_embeddings is not None:
            query, key = self._apply_rotary(
                query, key, *position_embeddings, num_prefix_tokens
            )
        mask = interpret_mask(attention_mask, query.shape[1], key.shape[1])
        mask = mask.replace(self_attention=True)
        output = self._joined(query, key, value, mask, training)
        output = self.dropout(output, training=training)
        return self.output_dense(output, training=training)
