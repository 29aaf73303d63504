"""Generates text with Gemma 3, whose cache is a pair of arrays for each layer.

Other tasks of KerasHub keep the keys and values of all layers in one array.
"""

import keras_rfattn.models.generation as generation


@generation.overriding("_build_cache")
def build_cache(
    task, original, known, token_ids, img_embeddings, vision_mask, padding_mask, indices
):
    """Runs the task's `_build_cache`, which processes the prompt in parallel."""
    return generation.build_cache(task, token_ids, padding_mask=padding_mask)


def _pairs(blank):
    return [(blank[:, i, 0], blank[:, i, 1]) for i in range(blank.shape[1])]


call_with_cache = generation.make_call_with_cache(_pairs)


FAMILY = generation.Family(
    "_build_cache",
    ["token_ids", "img_embeddings", "vision_mask", "padding_mask", "vision_indices"],
    {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generation.make_generate_step(),
    },
)
