"""Generates text with encoder-decoders, which sum the encoder's tokens only once.

The decoder's self-attention generates as in a `CausalLM` (`generation`). For
cross-attention, every linear layer keeps one `ops.State` of the encoder's tokens, which
each new token reads; softmax layers of a mixed model keep keys and values.
"""

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.decoding import CrossDecoder
from keras_rfattn.models.carried import carried, empty_layers, kept, placeholder


@generation.overriding("_initialize_cache")
def initialize_cache(task, original, known, encoder_token_ids, decoder_token_ids):
    """Runs `Seq2SeqLM._initialize_cache`."""
    cache = generation.empty_cache(task, *ops.shape(decoder_token_ids))
    crossing = [x for x in known.sites if generation.crosses(x)]
    batch, length = ops.shape(encoder_token_ids)
    exact = empty_layers(crossing, batch, length)
    blank = placeholder(task, crossing, batch, length if exact else 1)
    return cache._replace(layers=cache.layers | exact), blank


@generation.overriding("call_decoder_with_cache")
def call_decoder_with_cache(
    task,
    original,
    known,
    encoder_hidden_states,
    encoder_padding_mask,
    decoder_token_ids,
    self_attention_cache=None,
    self_attention_cache_update_index=None,
    cross_attention_cache=None,
    *args,
    **kwargs,
):
    """Runs the task's `call_decoder_with_cache`."""
    start = ops.convert_to_tensor(self_attention_cache_update_index, dtype="int32")
    cache, length = self_attention_cache, ops.shape(decoder_token_ids)[1]
    decoder, seen = generation.decoding(known, cache, length, start)
    own = known._replace(sites=[x for x in known.sites if generation.decodes(x)])
    # The prompt's padding says nothing of the encoder's tokens.
    crossing = generation.Generating([x for x in known.sites if generation.crosses(x)])
    with (
        carried(task, own, cache, decoder) as (parts, blank),
        carried(task, crossing, cache, CrossDecoder) as (cross_parts, _),
    ):
        logits, hidden_states, *_ = original(
            encoder_hidden_states, encoder_padding_mask, decoder_token_ids, blank,
            start, cross_attention_cache, *args, **kwargs,
        )  # fmt: skip
    after = generation.Cache(seen, kept(parts | cross_parts), cache.model)
    return logits, hidden_states, after, cross_attention_cache


FAMILY = generation.Family(
    "_initialize_cache",
    "encoder_token_ids decoder_token_ids",
    {
        "_initialize_cache": initialize_cache,
        "call_decoder_with_cache": call_decoder_with_cache,
        "generate_step": generation.generate_step,
    },
)
