"""Generates text with Moonshine, which sums the encoded speech only once.

It works as for encoder-decoders of text (`seq2seq`), with two differences: the task
takes speech, and it runs the whole prompt through its decoder while it builds its
caches.
"""

from keras import ops

import keras_rfattn.models.generation as generation
import keras_rfattn.models.seq2seq as seq2seq
from keras_rfattn.models.carried import sums_up

# Parameters of `_build_cache`, by which such tasks are recognized.
BUILD = [
    "encoder_input_values",
    "encoder_padding_mask",
    "decoder_token_ids",
    "decoder_padding_mask",
]


def build_cache(
    task,
    encoder_input_values,
    encoder_padding_mask,
    decoder_token_ids,
    decoder_padding_mask,
):
    """Runs the task's `_build_cache`.

    Returns:
        `(hidden_states, cache, cross_cache, encoder_hidden_states, encoder_mask)`.
        `cross_cache` holds the keys and values of layers that keep them for
        cross-attention; it is a placeholder if there are none.
    """
    known = generation.context(task)
    original = type(task).original_class._build_cache
    given = (
        encoder_input_values,
        encoder_padding_mask,
        decoder_token_ids,
        decoder_padding_mask,
    )
    if not generation.has_states(known.sites):
        return original(task, *given)
    cache = generation.empty_cache(task, *ops.shape(decoder_token_ids))
    start = ops.convert_to_tensor(0, dtype="int32")
    with seq2seq.answered(task, known, cache, decoder_token_ids, start) as call:
        hidden_states, _, cross, *encoded = original(task, *given)
        cache = call.cache()
    if all(sums_up(x) for x in known.sites if generation.crosses(x)):
        cross = call.cross_blank
    return hidden_states, cache, cross, *encoded


def call_decoder_with_cache(
    task,
    encoder_hidden_states,
    encoder_padding_mask,
    decoder_token_ids,
    self_attention_cache=None,
    self_attention_cache_update_index=None,
    cross_attention_cache=None,
):
    """Runs the task's `call_decoder_with_cache`.

    The arguments are those of `seq2seq.call_decoder_with_cache`.

    Returns:
        `(logits, hidden_states, self_attention_cache, cross_attention_cache)`.
    """
    known, cache = generation.context(task), self_attention_cache
    original = type(task).original_class.call_decoder_with_cache
    encoded = encoder_hidden_states, encoder_padding_mask
    index = self_attention_cache_update_index
    if not generation.has_states(known.sites):
        return original(
            task, *encoded, decoder_token_ids, cache, index, cross_attention_cache
        )
    start = ops.convert_to_tensor(index, dtype="int32")
    with seq2seq.answered(task, known, cache, decoder_token_ids, start) as call:
        logits, hidden_states, *_ = original(
            task, *encoded, decoder_token_ids, call.blank, start, cross_attention_cache
        )
        cache = call.cache()
    return logits, hidden_states, cache, cross_attention_cache


def members(cls):
    """Returns the methods for a task's carrier, if it turns speech into text."""
    if not generation.takes(cls, "_build_cache", BUILD):
        return {}
    return {
        "_build_cache": build_cache,
        "call_decoder_with_cache": call_decoder_with_cache,
        "generate_step": generation.make_generate_step("decoder_padding_mask"),
    }
