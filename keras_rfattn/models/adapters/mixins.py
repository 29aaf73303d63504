"""What KerasHub's classes become: mixins of decoder blocks and of attention.

Rows of `known` name them. A mixin of attention comes before the class it is of, and
leaves projections, rotary embeddings, normalizations and scale to it.
"""

import contextlib

import keras

from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.call_context import hand_over
from keras_rfattn.layers.decoding import turned_from
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.masks import interpret_mask

# What decoder blocks call their self-attention, and the cache that is handed to it.
SELF_ATTENTION = (
    "_self_attention_layer", "attention", "self_attn", "self_attention",
)  # fmt: skip
CACHES = ("self_attention_cache", "attention_cache")


def self_attention(block):
    """The self-attention layer of a decoder block."""
    return next(getattr(block, x) for x in SELF_ATTENTION if hasattr(block, x))


class DecoderMasks:
    """Mixin of decoder blocks: causality as a fact instead of a dense mask."""

    # Whether all tokens see those of a prompt.
    has_prefix = False

    @staticmethod
    def is_causal(block, layer):
        """Whether `layer` of `block` is causal self-attention."""
        return layer is self_attention(block)

    @staticmethod
    def is_cross(block, layer):
        """Whether `layer` of `block` attends to the encoder's tokens."""
        return not DecoderMasks.is_causal(block, layer)

    def _compute_self_attention_mask(
        self,
        decoder_sequence,
        decoder_padding_mask,
        **others,
    ):
        if not isinstance(self_attention(self), LinearAttention):
            return super()._compute_self_attention_mask(
                decoder_sequence=decoder_sequence,
                decoder_padding_mask=decoder_padding_mask,
                **others,
            )
        length, causal = decoder_sequence.shape[1], others.get("use_causal_mask", True)
        mask = interpret_mask(others.get("decoder_attention_mask"), length, length)
        padding = decoder_padding_mask
        if padding is None:
            padding = getattr(decoder_sequence, "_keras_mask", None)
        name = next(x for x in CACHES if x in others)
        if others[name] is not None:
            offset = others[f"{name}_update_index"]
            return mask.replace(causal=causal, offset=0 if offset is None else offset)
        if padding is not None:
            padding = keras.ops.cast(padding, "bool")
            known = mask.key_mask
            mask = mask.replace(key_mask=padding if known is None else known & padding)
        return mask.replace(causal=mask.causal or causal, self_attention=True)


class SparseDecoderMasks(DecoderMasks):
    """Mixin of blocks that hand the mask to their experts too, which count rows."""

    def _compute_self_attention_mask(self, decoder_sequence, **others):
        mask = super()._compute_self_attention_mask(decoder_sequence, **others)
        if not isinstance(mask, AttentionMask):
            return mask
        # The experts ask of a dense mask whether a row sees any key.
        rows = keras.ops.ones_like(decoder_sequence[..., :1], dtype="bool")
        if mask.key_mask is not None:
            seen = keras.ops.cumsum(keras.ops.cast(mask.key_mask, "int32"), axis=1) > 0
            rows = rows & keras.ops.expand_dims(seen, -1)
        hand_over(rows, mask)
        return rows


class GemmaMasks(DecoderMasks):
    """Mixin of Gemma's blocks, whose method has another name."""

    def _compute_attention_mask(self, x, padding_mask, cache, cache_update_index):
        if not isinstance(self.attention, LinearAttention):
            return super()._compute_attention_mask(
                x, padding_mask, cache, cache_update_index
            )
        return self._compute_self_attention_mask(
            decoder_sequence=x,
            decoder_padding_mask=padding_mask,
            self_attention_cache=cache,
            self_attention_cache_update_index=cache_update_index,
        )


class PaliGemmaMasks(GemmaMasks):
    """Mixin of PaliGemma's blocks: causal after image and prompt (prefix-LM)."""

    has_prefix = True

    def _compute_attention_mask(
        self, x, padding_mask, cache, cache_update_index, response_mask=None
    ):
        given = x, padding_mask, cache, cache_update_index
        if not isinstance(self.attention, LinearAttention):
            # Past Gemma's mixin, whose method has one argument less.
            return super(GemmaMasks, self)._compute_attention_mask(
                *given, response_mask
            )
        if padding_mask is None:
            return super()._compute_attention_mask(*given)
        length = keras.ops.shape(x)[1]

        def with_image(mask, value):
            mask = keras.ops.cast(mask, "bool")
            image = length - keras.ops.shape(mask)[1]
            return keras.ops.pad(mask, ((0, 0), (image, 0)), constant_values=value)

        prompt = with_image(padding_mask, True)
        if response_mask is None:
            # Not of self-attention, so that no statistic is taken which generation,
            # token by token, could not take.
            return AttentionMask(prompt, query_mask=prompt)
        response = with_image(response_mask, False)
        prompt = prompt & ~response
        return AttentionMask(
            prompt | response, causal=True, self_attention=True, prefix_mask=prompt
        )


class CachedAttention(LinearAttention):
    """Mixin of KerasHub's attention classes."""

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
    """Mixin of decoders' attention with rotary embeddings and grouped heads."""

    def _kv_shape(self):
        names = ("num_key_value_heads", "_num_key_value_heads", "num_heads")
        heads = next(getattr(self, x) for x in names if hasattr(self, x))
        # The head dim has many names, and its square root one.
        return heads, round(self._inv_norm_factor**-2)

    def _compute_attention(self, *args, **kwargs):
        output, _ = super()._compute_attention(*args, **kwargs)
        return output


class GPTNeoXAttention(RotaryAttention):
    """Mixin of GPT-NeoX's attention, which caches keys before they are turned."""

    def call(self, hidden_states, **kwargs):
        """`(B, T, D) -> (B, T, D)`."""
        with self.placed(self, kwargs):
            return super().call(hidden_states, **kwargs)

    @staticmethod
    def placed(layer, kwargs):
        """A call's queries are turned by their position in its cache meanwhile.

        KerasHub turns them as if the first of them were the first of the cache.
        """
        start = kwargs.get("cache_update_index")
        if kwargs.get("cache") is None or start is None:
            return contextlib.nullcontext()
        # Queries come first, and then all the keys of the cache.
        return turned_from(layer, start, count=1)


class GemmaAttention(RotaryAttention):
    """Mixin of Gemma's attention, which looks into its mask and has its own scale."""

    def _kv_shape(self):
        return self.num_key_value_heads, self.head_dim

    def call(self, x, attention_mask=None, **kwargs):
        """`(B, T, D) -> (B, T, D)`; the mask an `AttentionMask`."""
        mask = AttentionMask() if attention_mask is None else attention_mask
        # Rows that see no key are 0 already.
        seen = keras.ops.ones((1, 1, 1), dtype="bool")
        with context_of(self).replace(mask=mask).active():
            return super().call(x, attention_mask=seen, **kwargs)

    def _compute_attention(self, query, key, value, attention_mask=None, **kwargs):
        if not self.query_head_dim_normalize:
            wanted = self.hidden_dim // self.num_query_heads
            query = query * keras.ops.cast((self.head_dim / wanted) ** 0.5, query.dtype)
        return super()._compute_attention(query, key, value, attention_mask, **kwargs)


class MoonshineAttention(CachedAttention):
    """Mixin of Moonshine's attention, which looks into its mask."""

    def call(self, query, value, key, rotary_embedding=None, attention_mask=None,
             **kwargs):  # fmt: skip
        """As the class's own; the mask may be an `AttentionMask`."""
        context = context_of(self)
        if isinstance(attention_mask, AttentionMask):
            context, attention_mask = context.replace(mask=attention_mask), None
        with context.active():
            return super().call(
                query, value, key, rotary_embedding, attention_mask, **kwargs
            )
