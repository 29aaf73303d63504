"""Generates text with Gemma 3, whose cache is a pair of arrays for each layer.

Other tasks of KerasHub keep the keys and values of all layers in one array.
"""

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.models.carried import carried, kept


@generation.overriding("_build_cache")
def build_cache(
    task, original, known, token_ids, img_embeddings, vision_mask, padding_mask, indices
):
    """Runs the task's `_build_cache`, which processes the prompt in parallel."""
    given = {"padding_mask": padding_mask}
    return generation.build_cache(task, token_ids, **given)


@generation.overriding("call_with_cache")
def call_with_cache(
    task, original, known, token_ids, cache, cache_update_index, *args, **kwargs
):
    """Runs the task's `call_with_cache`."""
    generation.check_cache(task, cache)
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    length = ops.shape(token_ids)[1]
    decoder, _, seen = generation.decoding(known, cache, length, start)
    with carried(task, known, cache, decoder) as (parts, blank):
        pairs = [(blank[:, i, 0], blank[:, i, 1]) for i in range(blank.shape[1])]
        logits, hidden_states, _ = original(token_ids, pairs, start, *args, **kwargs)
    return logits, hidden_states, generation.Cache(seen, kept(parts), cache.model)


FAMILY = generation.Family(
    "_build_cache",
    ["token_ids", "img_embeddings", "vision_mask", "padding_mask", "vision_indices"],
    {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generation.make_generate_step(),
    },
)
