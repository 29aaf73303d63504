"""Mixins for KerasHub's encoder attention that computes softmax inside `call`.

They differ from those in `mixins`: they define a new `call`, which uses the projections
of the original class.
"""

import keras

from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.ops.masks import AttentionMask, interpret_mask


class RoformerAttention(LinearAttention):
    """Mixin for RoFormer V2's attention, which computes softmax inside `call`."""

    def _kv_shape(self):
        return self.heads, self.head_size

    def _turned(self, query, key):
        return self.rotary_embedding_layer([query, key])

    def call(self, x, attention_mask=None):
        """Maps `(B, T, D)` to `(B, T, D)`; `attention_mask` `(B, T)` hides keys.

        On JAX and TensorFlow, the original class hides padded queries instead.
        """
        ops = keras.ops
        batch, length = ops.shape(x)[:2]
        query, key, value = (
            ops.reshape(dense(x), (batch, length, self.heads, self.head_size))
            for dense in (self.q_dense, self.k_dense, self.v_dense)
        )
        query, key = self._turned(query, key)
        mask = AttentionMask(self_attention=True)
        if attention_mask is not None:
            visible = ops.reshape(ops.cast(attention_mask, "bool"), (batch, length))
            mask = mask.replace(key_mask=visible)
        output, _ = self._compute_attention(query, key, value, attention_mask=mask)
        return self.o_dense(ops.reshape(output, (batch, length, -1)))


class EsmAttention(RoformerAttention):
    """Mixin for ESM's attention, which has another rotary embedding or none."""

    def _turned(self, query, key):
        return (
            self.rotary_embedding_layer(query, key) if self.use_rotary else (query, key)
        )


class PaliGemmaVitAttention(LinearAttention):
    """Mixin for PaliGemma's image attention, which computes softmax inside `call`."""

    def _kv_shape(self):
        return self.num_heads, self.head_dim

    def call(
        self, x, attention_mask=None, return_attention_scores=None, training=False
    ):
        """Maps `(B, T, D)` to `((B, T, D), None)`; the original also returns scores."""
        ops = keras.ops
        if attention_mask is not None:
            raise ValueError(
                "Attention over images takes no mask. Received: attention_mask of "
                f"shape {tuple(attention_mask.shape)}. Leave it out."
            )
        batch, length = ops.shape(x)[:2]
        query, key, value = (
            ops.reshape(dense(x), (batch, length, self.num_heads, self.head_dim))
            for dense in (self.query_proj, self.key_proj, self.value_proj)
        )
        output, _ = self._compute_attention(
            query,
            key,
            value,
            AttentionMask(self_attention=True),
            training,
            bool(return_attention_scores),
        )
        output = ops.reshape(output, (batch, length, -1))
        return self.out_proj(output, training=training), None


class DINOV3Attention(LinearAttention):
    """Mixin for DINOv3's attention, which computes softmax inside `call`."""

    def _kv_shape(self):
        return self.num_heads, self.head_dim

    def call(
        self,
        inputs,
        attention_mask=None,
        position_embeddings=None,
        num_prefix_tokens=0,
        training=None,
    ):
        """Maps `(B, T, D)` to `(B, T, D)`."""
        ops = keras.ops
        batch, length = ops.shape(inputs)[:2]
        query, key, value = (
            ops.reshape(
                dense(inputs, training=training),
                (batch, length, self.num_heads, self.head_dim),
            )
            for dense in (self.query_dense, self.key_dense, self.value_dense)
        )
        if position_embeddings is not None:
            query, key = self._apply_rotary(
                query, key, *position_embeddings, num_prefix_tokens
            )
        mask = interpret_mask(attention_mask, query.shape[1], key.shape[1])
        output, _ = self._compute_attention(
            query, key, value, mask.replace(self_attention=True), training
        )
        output = ops.reshape(output, (batch, length, -1))
        return self.output_dense(
            self.dropout(output, training=training), training=training
        )
