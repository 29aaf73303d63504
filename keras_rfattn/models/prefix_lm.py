"""Generation after an image and a prompt that see all of each other (PaliGemma).

The prompt is summed up at once, and answered from the sums. What is generated then
enters the state token by token, as in `generation`.
"""

import inspect

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.decoding import Decoder
from keras_rfattn.models.carried import carried
from keras_rfattn.models.carried import kept

BUILD = ["self", "token_ids", "img_embeddings", "padding_mask"]


def build_cache(task, token_ids, img_embeddings, padding_mask):
    """`_build_cache` of the task: images and prompts."""
    if not generation.has_states(generation.context(task).sites):
        original = type(task).original_class._build_cache
        return original(task, token_ids, img_embeddings, padding_mask)
    batch, length = ops.shape(token_ids)
    length = length + task.backbone.image_sequence_length
    cache = generation.empty_cache(task, batch, length)
    _, hidden_states, cache = task.call_with_cache(
        token_ids, cache, 0, img_embeddings, padding_mask
    )
    return hidden_states, cache


def call_with_cache(
    task, token_ids, cache, cache_update_index, img_embeddings=None, padding_mask=None
):
    """`call_with_cache` of the task; with images a prompt, without the tokens after it.

    Args:
        task: The task.
        token_ids: Integers `(B, T)`.
        cache: `generation.Cache`.
        cache_update_index: Position of the first token, counted from the image.
        img_embeddings: `(B, S, D)`.
        padding_mask: `(B, T)`, true for tokens of the prompt.

    Returns:
        `(logits, hidden_states, cache)`.

    Raises:
        ValueError: If `cache` is not a `Cache`.
    """
    known = generation.context(task)
    if img_embeddings is None or not isinstance(cache, generation.Cache):
        return generation.call_with_cache(
            task, token_ids, cache, cache_update_index,
            **({} if img_embeddings is None else {
                "img_embeddings": img_embeddings, "padding_mask": padding_mask}),
        )  # fmt: skip
    image = ops.ones(ops.shape(img_embeddings)[:2], dtype="bool")
    prompt = ops.cast(padding_mask, "bool")
    real = prompt if known.hidden is None else prompt & ~known.hidden
    enters = ops.concatenate([image, real], axis=1)
    # Of padding in a prompt too: nothing is written there any more.
    seen = ops.shape(image)[1] + ops.sum(ops.cast(prompt, "int32"), axis=1)

    def decoder(state):
        return Decoder(state, enters, None, 0, is_prefix=True)

    original = type(task).original_class.call_with_cache
    is_hidden = generation.hidden_keys(known, ops.shape(token_ids)[0])
    with carried(known.sites, cache.layers, decoder, is_hidden) as (parts, blank):
        logits, hidden_states, _ = original(
            task,
            token_ids,
            blank(ops.shape(token_ids)[0], task.compute_dtype),
            0,
            img_embeddings,
            padding_mask,
        )
    cache = generation.Cache(seen, kept(parts), cache.model)
    return logits, hidden_states, cache


def generate_step(task, inputs, stop_token_ids=None):
    """`generate_step` of the task, for padding wherever it is."""
    image = "image_sequence_length"
    return generation.stepped(task, inputs, stop_token_ids, "padding_mask", image)


def members(cls):
    """Methods that a task's class gets, if it is of images and prompts."""
    build = getattr(cls, "_build_cache", None)
    is_causal = any(base.__name__ == "CausalLM" for base in cls.__mro__)
    if not is_causal or build is None:
        return {}
    if list(inspect.signature(build).parameters) != BUILD:
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generate_step,
    }
