"""Generates text with BLIP-2, which puts an image before the prompt.

Attention is causal over the image and the prompt. The features that the Q-Former
computes from the image enter the states together with the prompt, in parallel. Later
tokens are processed as in `generation`.
"""

from keras import ops

import keras_rfattn.models.generation as generation


@generation.overriding("_build_cache")
def build_cache(task, original, known, token_ids, projected_features, padding_mask):
    """Runs the task's `_build_cache`, which processes images (if any) and prompts.

    Raises:
        ValueError: If images are missing and the model takes images.
    """
    images = task.backbone.num_query_tokens
    if projected_features is None:
        if images:
            raise ValueError(
                f"{type(task).__name__} needs images, which take {images} positions "
                "before each text. Received: no images. Pass `{'images': ..., 'text': "
                "...}`."
            )
        # Without features the task would give every token of the prompt the position
        # of the first.
        shape = ops.shape(token_ids)[0], 0, task.backbone.language_model.hidden_dim
        projected_features = ops.zeros(shape, dtype=task.compute_dtype)
    inputs = token_ids, projected_features, padding_mask
    return generation.build_cache(task, *inputs, before=images)


@generation.overriding("call_with_cache")
def call_with_cache(
    task,
    original,
    known,
    token_ids,
    cache,
    cache_update_index,
    projected_features=None,
    padding_mask=None,
):
    """Runs the task's `call_with_cache`.

    `generation.call_with_cache` describes the other arguments.

    Args:
        cache_update_index: Position of the image if there is one, otherwise of the
            first token.
        projected_features: Image features `(B, S, D)`, or `None`.
        padding_mask: `(B, T)`, true for tokens of the prompt, or `None`.
    """
    before = 0 if projected_features is None else ops.shape(projected_features)[1]
    given = {"projected_features": projected_features, "padding_mask": padding_mask}
    return generation.call_with_cache(
        task, token_ids, cache, cache_update_index, before=before, **given
    )


FAMILY = generation.Family(
    "_build_cache",
    ["token_ids", "projected_features", "padding_mask"],
    {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generation.make_generate_step(before="num_query_tokens"),
    },
)
