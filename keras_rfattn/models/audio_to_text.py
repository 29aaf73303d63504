"""Generates text with Moonshine, which sums the encoded speech only once.

It works as for encoder-decoders of text (`seq2seq`), with two differences: the task
takes speech, and it runs the whole prompt through its decoder while it builds its
caches.
"""

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.models.carried import sums_up
from keras_rfattn.models.seq2seq import answered


@generation.in_place_of("_build_cache")
def build_cache(
    task,
    original,
    known,
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
    cache = generation.empty_cache(task, *ops.shape(decoder_token_ids))
    start = ops.convert_to_tensor(0, dtype="int32")
    with answered(task, known, cache, decoder_token_ids, start) as (blanks, after):
        hidden_states, _, cross, *encoded = original(
            encoder_input_values,
            encoder_padding_mask,
            decoder_token_ids,
            decoder_padding_mask,
        )
    if all(sums_up(x) for x in known.sites if generation.crosses(x)):
        cross = blanks[1]
    return hidden_states, after(), cross, *encoded


@generation.in_place_of("call_decoder_with_cache")
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
):
    """Runs the task's `call_decoder_with_cache`.

    The arguments and results are those of `seq2seq.call_decoder_with_cache`.
    """
    start = ops.convert_to_tensor(self_attention_cache_update_index, dtype="int32")
    cache = self_attention_cache
    with answered(task, known, cache, decoder_token_ids, start) as (blanks, after):
        logits, hidden_states, *_ = original(
            encoder_hidden_states,
            encoder_padding_mask,
            decoder_token_ids,
            blanks[0],
            start,
            cross_attention_cache,
        )
    return logits, hidden_states, after(), cross_attention_cache


FAMILY = generation.Family(
    "_build_cache",
    [
        "encoder_input_values",
        "encoder_padding_mask",
        "decoder_token_ids",
        "decoder_padding_mask",
    ],
    {
        "_build_cache": build_cache,
        "call_decoder_with_cache": call_decoder_with_cache,
        "generate_step": generation.make_generate_step("decoder_padding_mask"),
    },
)
