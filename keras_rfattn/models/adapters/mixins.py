"""Mixins for KerasHub's decoder blocks and attention classes.

The rows of `known` name them. An attention mixin precedes the original class in the
bases, and leaves projections, rotary embeddings, normalizations and scale to that
class. Attention of some encoders computes softmax inside `call`: their mixins define a
new `call`, which uses the projections of the original class.
"""

import contextlib

import keras

from keras_rfattn.layers.call_context import context_of, hand_over
from keras_rfattn.layers.checks import projection
from keras_rfattn.layers.decoding import turned_from
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.models.carried import also
from keras_rfattn.ops.masks import AttentionMask, interpret_mask

# Attribute names of the self-attention in decoder blocks.
SELF_ATTENTION = (
    "_self_attention_layer", "self_attention_layer", "attention", "self_attn",
    "self_attention",
)  # fmt: skip
# Argument names of the cache for this self-attention.
CACHES = ("self_attention_cache", "attention_cache")


def self_attention(block):
    """Returns the self-attention layer of a decoder block."""
    return next(getattr(block, x) for x in SELF_ATTENTION if hasattr(block, x))


def check_generates(layer):
    """Raises `ValueError` if a cache comes from a task that knows of no states."""
    if context_of(layer).recorder is None and "call" not in vars(layer):
        raise ValueError(
            "A task must know of the linear attention with which it generates. "
            "Received: a cache from a task that was made around a backbone whose "
            f"attention was linear already, in layer '{layer.name}'. Call "
            "`keras_rfattn.register(task)` first."
        )


class DecoderMasks:
    """Mixin for decoder blocks that builds an `AttentionMask`, not a dense mask."""

    # Whether all tokens see the whole prompt (prefix-LM).
    has_prefix = False

    @staticmethod
    def refusal(block):
        """Returns why the masks of `block` rule linear attention out, or `None`."""
        return None

    @staticmethod
    def is_causal(block, layer):
        """Returns whether `layer` of `block` is causal self-attention."""
        return layer is self_attention(block)

    def _compute_self_attention_mask(
        self, decoder_sequence, decoder_padding_mask, **others
    ):
        if not isinstance(self_attention(self), LinearAttention):
            return super()._compute_self_attention_mask(
                decoder_sequence=decoder_sequence,
                decoder_padding_mask=decoder_padding_mask,
                **others,
            )
        name = next(x for x in CACHES if x in others)
        return self._linear_mask(
            decoder_sequence,
            decoder_padding_mask,
            others[name],
            others[f"{name}_update_index"],
            others.get("use_causal_mask", True),
            others.get("decoder_attention_mask"),
        )

    def _linear_mask(self, x, padding, cache, start, causal=True, dense=None):
        """Returns the `AttentionMask` of tokens `(B, T, D)` from position `start`."""
        mask = interpret_mask(dense, x.shape[1], x.shape[1])
        if cache is not None:
            return mask.replace(causal=causal, offset=0 if start is None else start)
        if padding is None:
            padding = getattr(x, "_keras_mask", None)
        if padding is not None:
            mask = also(mask, keras.ops.cast(padding, "bool"))
        return mask.replace(causal=mask.causal or causal, self_attention=True)


class SparseMasks(DecoderMasks):
    """Mixin for mixture-of-experts blocks, whose experts get the mask too."""

    def _linear_mask(self, x, *args):
        mask = super()._linear_mask(x, *args)
        # The experts only need to know of each row whether it sees any key. The
        # `AttentionMask` is handed over to the attention layer separately.
        rows = keras.ops.ones_like(x[..., :1], dtype="bool")
        if mask.key_mask is not None:
            seen = keras.ops.cumsum(keras.ops.cast(mask.key_mask, "int32"), axis=1) > 0
            rows = rows & keras.ops.expand_dims(seen, -1)
        hand_over(rows, mask)
        return rows


class GemmaMasks(DecoderMasks):
    """Mixin for Gemma's blocks, whose mask method has another name."""

    def _compute_attention_mask(self, *args):
        if not isinstance(self.attention, LinearAttention):
            return super()._compute_attention_mask(*args)
        return self._linear_mask(*args)


class Gemma3Masks(GemmaMasks):
    """Mixin for Gemma 3's blocks, causal or (in EmbeddingGemma) bidirectional."""

    @staticmethod
    def refusal(block):
        """Returns a reason if tokens of an image see each other, else `None`."""
        arguments = (node.arguments.kwargs for node in block._inbound_nodes)
        if any(x.get("vision_mask") is not None for x in arguments):
            return (
                "the tokens of an image see each other; build the backbone without "
                "`vision_encoder`"
            )
        return None

    @staticmethod
    def is_causal(block, layer):
        """Returns whether `block` is causal."""
        return not block.use_bidirectional_attention

    def _linear_mask(self, x, padding, vision_mask, cache, start):
        causal = not self.use_bidirectional_attention
        mask = super()._linear_mask(x, padding, cache, start, causal)
        # In bidirectional blocks, padding is hidden as a query too.
        is_plain = mask.causal or mask.key_mask is None
        return mask if is_plain else mask.replace(query_mask=mask.key_mask)


class PaliGemmaMasks(GemmaMasks):
    """Mixin for PaliGemma's blocks, causal only after image and prompt (prefix-LM)."""

    has_prefix = True

    def _linear_mask(self, x, padding, cache, start, response_mask=None):
        if padding is None:
            if cache is not None:
                check_generates(self.attention)
            return super()._linear_mask(x, padding, cache, start)
        length = keras.ops.shape(x)[1]

        def with_image(mask, value):
            mask = keras.ops.cast(mask, "bool")
            image = length - keras.ops.shape(mask)[1]
            return keras.ops.pad(mask, ((0, 0), (image, 0)), constant_values=value)

        prompt = with_image(padding, True)
        if response_mask is None:
            # `self_attention` stays `False`, so that the map takes no statistic that
            # generation, token by token, could not take.
            return AttentionMask(prompt, query_mask=prompt)
        response = with_image(response_mask, False)
        prompt = prompt & ~response
        return AttentionMask(
            prompt | response, causal=True, self_attention=True, prefix_mask=prompt
        )


class CachedAttention(LinearAttention):
    """Mixin for KerasHub's attention classes."""

    def _compute_attention(self, query, key, value, attention_mask=None, **kwargs):
        context = context_of(self)
        if context.mask is not None:
            attention_mask = context.mask
        if not isinstance(attention_mask, AttentionMask):
            mask = interpret_mask(attention_mask, query.shape[1], key.shape[1])
            attention_mask = mask.replace(self_attention=context.self_attention)
        return super()._compute_attention(
            query, key, value, attention_mask=attention_mask, **kwargs
        )

    def _compute_vllm_attention(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__} is linear attention; KerasHub's vLLM route would "
            "run softmax attention in its place. Serve the model without vLLM, or "
            "call `restore_attention` first."
        )


class RotaryAttention(CachedAttention):
    """Mixin for decoder attention with rotary embeddings and grouped heads."""

    def _kv_shape(self):
        names = ("num_key_value_heads", "_num_key_value_heads", "num_heads")
        heads = next(getattr(self, x) for x in names if hasattr(self, x))
        # The classes name the head dim differently, but all have `_inv_norm_factor`,
        # which is its inverse square root.
        return heads, round(self._inv_norm_factor**-2)

    def _compute_attention(self, *args, **kwargs):
        output, _ = super()._compute_attention(*args, **kwargs)
        return output


class GPTNeoXAttention(RotaryAttention):
    """Mixin for GPT-NeoX's attention, which caches keys before rotating them."""

    def call(self, hidden_states, **kwargs):
        """Maps `(B, T, D)` to `(B, T, D)`."""
        with self.placed(self, kwargs):
            return super().call(hidden_states, **kwargs)

    @staticmethod
    def placed(layer, kwargs):
        """Returns a context in which queries are rotated by their cache positions."""
        start = kwargs.get("cache_update_index")
        if kwargs.get("cache") is None or start is None:
            return contextlib.nullcontext()
        # The layer rotates the queries first, and then all keys of the cache, whose
        # rotation is right already.
        return turned_from(layer, start, count=1)


class GptOssAttention(RotaryAttention):
    """Mixin for GPT-OSS's attention, which has sinks."""

    sink_logits = "sinks"

    def _compute_attention(self, query, key, value, attention_mask=None, start_index=0):
        # Rotary embeddings have used the position already.
        return super()._compute_attention(query, key, value, attention_mask)


class GemmaAttention(RotaryAttention):
    """Mixin for Gemma's attention, which reads its mask and has its own scale."""

    def _kv_shape(self):
        return self.num_key_value_heads, self.head_dim

    def call(self, x, attention_mask=None, **kwargs):
        """Maps `(B, T, D)` to `(B, T, D)`; `attention_mask` is an `AttentionMask`."""
        mask = AttentionMask() if attention_mask is None else attention_mask
        # Gemma zeroes rows that see no key. Linear attention already does, so this mask
        # hides nothing.
        seen = keras.ops.ones((1, 1, 1), dtype="bool")
        with context_of(self).replace(mask=mask).active():
            return super().call(x, attention_mask=seen, **kwargs)

    def _compute_attention(self, query, key, value, attention_mask=None, **kwargs):
        if not self.query_head_dim_normalize:
            wanted = self.hidden_dim // self.num_query_heads
            query = query * keras.ops.cast((self.head_dim / wanted) ** 0.5, query.dtype)
        return super()._compute_attention(query, key, value, attention_mask, **kwargs)


class MoonshineAttention(CachedAttention):
    """Mixin for Moonshine's attention, which reads its mask."""

    def call(
        self, query, value, key, rotary_embedding=None, attention_mask=None, **kwargs
    ):
        """Runs the original `call`; `attention_mask` may be an `AttentionMask`."""
        context = context_of(self)
        if isinstance(attention_mask, AttentionMask):
            context, attention_mask = context.replace(mask=attention_mask), None
        with context.active():
            return super().call(
                query, value, key, rotary_embedding, attention_mask, **kwargs
            )


class EncoderAttention(LinearAttention):
    """Splits tokens into heads, and joins heads, for the mixins of encoders."""

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
