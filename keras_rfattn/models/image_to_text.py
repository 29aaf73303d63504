"""Generation of BLIP-2: an image stands before the prompt, and attention is causal.

What its Q-Former made of the image enters the states with the prompt, in parallel; then
all is as in `generation`.
"""

import inspect

from keras import ops

import keras_rfattn.models.generation as generation

BUILD = ["self", "token_ids", "projected_features", "padding_mask"]


def build_cache(task, token_ids, projected_features, padding_mask):
    """`_build_cache` of the task: images, or none of them, and prompts.

    Raises:
        ValueError: If images are missing in a model that takes them.
    """
    if not generation.has_states(generation.context(task).sites):
        original = type(task).original_class._build_cache
        return original(task, token_ids, projected_features, padding_mask)
    (batch, length), images = ops.shape(token_ids), task.backbone.num_query_tokens
    if projected_features is None:
        if images:
            raise ValueError(
                f"{type(task).__name__} has {images} positions of an image before "
                "each text. Received: no images. Pass `{'images': ..., 'text': ...}`."
            )
        # Without them the task gives all tokens of a prompt the first's position.
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
    """`call_with_cache` of the task; see `generation.call_with_cache`."""
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


def generate_step(task, inputs, stop_token_ids=None):
    """`generate_step` of the task, for padding wherever it is."""
    image = "num_query_tokens"
    return generation.stepped(task, inputs, stop_token_ids, "padding_mask", image)


def members(cls):
    """Methods that a task's class gets, if it puts an image before a text."""
    build = getattr(cls, "_build_cache", None)
    if build is None or list(inspect.signature(build).parameters) != BUILD:
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generate_step,
    }
