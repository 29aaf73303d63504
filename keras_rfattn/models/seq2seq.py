"""Generates text with encoder-decoders, which sum the encoder's tokens only once.

The decoder's self-attention generates as in a `CausalLM` (`generation`). For
cross-attention, every linear layer keeps one `ops.State` of the encoder's tokens, which
each new token reads; softmax layers of a mixed model keep keys and values.
"""

import contextlib
from typing import Any, NamedTuple

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.decoding import CrossDecoder, Decoder
from keras_rfattn.models.carried import carried, empty_layers, kept

# Parameters of `_initialize_cache`, by which such tasks are recognized.
INITIALIZE = ["encoder_token_ids", "decoder_token_ids"]


def initialize_cache(task, encoder_token_ids, decoder_token_ids):
    """Runs `Seq2SeqLM._initialize_cache`.

    The `Cache` also holds the cross-attention entries, because samplers repeat its
    rows.

    Returns:
        `(cache, placeholder)`: a `Cache`, and an array `(B, 1)` in place of the cache
        of cross-attention.
    """
    sites = generation.context(task).sites
    if not generation.has_states(sites):
        original = type(task).original_class._initialize_cache
        return original(task, encoder_token_ids, decoder_token_ids)
    cache = generation.empty_cache(task, *ops.shape(decoder_token_ids))
    crossing = [x for x in sites if generation.crosses(x)]
    sizes = ops.shape(encoder_token_ids)
    layers = cache.layers | empty_layers(crossing, *sizes)
    return cache._replace(layers=layers), ops.zeros((sizes[0], 1))


def call_decoder_with_cache(
    task,
    encoder_hidden_states,
    encoder_padding_mask,
    decoder_token_ids,
    self_attention_cache=None,
    self_attention_cache_update_index=None,
    cross_attention_cache=None,
    cross_attention_cache_update_index=None,
):
    """Runs `Seq2SeqLM.call_decoder_with_cache` of a task with linear attention.

    Args:
        task: The task.
        encoder_hidden_states: Encoder outputs `(B, S, D)`: batch size B, encoder length
            S, width D.
        encoder_padding_mask: `(B, S)`, true for real tokens of the encoder.
        decoder_token_ids: Integers `(B, T)`, one or many tokens per row.
        self_attention_cache: `Cache`, which also holds the cross-attention entries.
        self_attention_cache_update_index: Position of the first of `decoder_token_ids`.
        cross_attention_cache: A placeholder, which is returned unchanged.
        cross_attention_cache_update_index: 0 in the first call, `None` in later ones.

    Returns:
        `(logits, hidden_states, self_attention_cache, cross_attention_cache)`.
    """
    original = type(task).original_class.call_decoder_with_cache
    known, cache = generation.context(task), self_attention_cache
    if not generation.has_states(known.sites):
        return original(
            task,
            encoder_hidden_states,
            encoder_padding_mask,
            decoder_token_ids,
            cache,
            self_attention_cache_update_index,
            cross_attention_cache,
            cross_attention_cache_update_index,
        )
    start = ops.convert_to_tensor(self_attention_cache_update_index, dtype="int32")
    with answered(task, known, cache, decoder_token_ids, start) as call:
        logits, hidden_states, *_ = original(
            task,
            encoder_hidden_states,
            encoder_padding_mask,
            decoder_token_ids,
            call.blank,
            start,
            call.cross_blank,
            cross_attention_cache_update_index,
        )
        cache = call.cache()
    return logits, hidden_states, cache, cross_attention_cache


class DecoderCall(NamedTuple):
    """Placeholders for a decoder call, and the cache after it; see `answered`.

    Attributes:
        blank: Placeholder for the cache of self-attention.
        cross_blank: Placeholder for the cache of cross-attention.
        cache: Function that returns the `Cache` after the call.
    """

    blank: Any
    cross_blank: Any
    cache: Any


@contextlib.contextmanager
def answered(task, known, cache, token_ids, start):
    """Context manager in which the decoder's attention layers compute from a `Cache`.

    Args:
        task: The task.
        known: `generation.Generating`.
        cache: The `Cache` before the call.
        token_ids: Integers `(B, T)`, one or many tokens per row.
        start: Position of the first token.

    Yields:
        `DecoderCall`.
    """
    batch, length = ops.shape(token_ids)
    enters, passed, seen = generation.entering(known, cache, batch, length, start)

    def decoder(state):
        return Decoder(state, enters, passed, start)

    own = [x for x in known.sites if generation.decodes(x)]
    crossing = [x for x in known.sites if generation.crosses(x)]
    size = batch, task.compute_dtype
    is_hidden = generation.hidden_keys(known, batch)
    with (
        carried(own, cache.layers, decoder, is_hidden) as (parts, blank),
        carried(crossing, cache.layers, CrossDecoder) as (cross_parts, cross_blank),
    ):

        def after():
            return generation.Cache(seen, kept(parts | cross_parts), cache.model)

        yield DecoderCall(blank(*size), cross_blank(*size), after)


def members(cls):
    """Returns the methods for a task's carrier, if the task has a token encoder."""
    if not hasattr(cls, "call_decoder_with_cache"):
        return {}
    if not generation.takes(cls, "_initialize_cache", INITIALIZE):
        return {}
    return {
        "_initialize_cache": initialize_cache,
        "call_decoder_with_cache": call_decoder_with_cache,
        "generate_step": generation.make_generate_step("decoder_padding_mask"),
    }
