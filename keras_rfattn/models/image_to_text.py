"""Generates text with BLIP-2, which puts an image before the prompt.

Attention is causal over the image and the prompt. The features that the Q-Former
computes from the image enter the states together with the prompt, in parallel. Later
tokens are processed as in `generation`.
"""

from keras import ops

import keras_rfattn.models.generation as generation

# Parameters of `_build_cache`, by which such tasks are recognized.
BUILD = ["token_ids", "projected_features", "padding_mask"]


def build_cache(task, token_ids, projected_features, padding_mask):
    """Runs the task's `_build_cache`, which processes images (if any) and prompts.

    Raises:
        ValueError: If images are missing and the model takes images.
    """
    if not generation.has_states(generation.context(task).sites):
        original = type(task).original_class._build_cache
        return original(task, token_ids, projected_features, padding_mask)
    (batch, length), images = ops.shape(token_ids), task.backbone.num_query_tokens
    if projected_features is None:
        if images:
            raise ValueError(
                f"{type(task).__name__} needs images, which take {images} positions "
                "before each text. Received: no images. Pass `{'images': ..., 'text': "
                "...}`."
            )
        # Without features the task would give every token of the prompt the position
        # of the first.
        width = task.backbone.language_model.hidden_dim
        projected_features = ops.zeros((batch, 0, width), dtype=task.compute_dtype)
    cache = generation.empty_cache(task, batch, images + length)
    _, hidden_states, cache = task.call_with_cache(
        token_ids,
        cache,
        0,
        projected_features=projected_features,
        padding_mask=padding_mask,
    )
    return hidden_states, cache


def call_with_cache(
    task,
    token_ids,
    cache,
    cache_update_index,
    projected_features=None,
    padding_mask=None,
):
    """Runs the task's `call_with_cache`.

    Args:
        task: The task.
        token_ids: Integers `(B, T)`, one or many tokens per row.
        cache: The `generation.Cache` before these tokens.
        cache_update_index: Position of the image if there is one, otherwise of the
            first token.
        projected_features: Image features `(B, S, D)`, or `None`.
        padding_mask: `(B, T)`, true for tokens of the prompt, or `None`.

    Returns:
        `(logits, hidden_states, cache)`, with the `generation.Cache` after these
        tokens.
    """
    before = 0 if projected_features is None else ops.shape(projected_features)[1]
    return generation.call_with_cache(
        task,
        token_ids,
        cache,
        cache_update_index,
        projected_features=projected_features,
        padding_mask=padding_mask,
        before=before,
    )


def members(cls):
    """Returns the methods for a task's carrier, if it puts an image before a text."""
    if not generation.takes(cls, "_build_cache", BUILD):
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generation.make_generate_step(before="num_query_tokens"),
    }
