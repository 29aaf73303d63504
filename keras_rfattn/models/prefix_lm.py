"""Generates text after an image and a prompt that see each other fully (PaliGemma).

All tokens of the image and the prompt are summed into the states first, and each of
them then reads the full sums. Generated tokens enter the states one by one, as in
`generation`.
"""

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.decoding import Decoder
from keras_rfattn.models.carried import carried, kept

# Parameters of `_build_cache`, by which such tasks are recognized.
BUILD = ["token_ids", "img_embeddings", "padding_mask"]


def build_cache(task, token_ids, img_embeddings, padding_mask):
    """Runs the task's `_build_cache`, which processes images and prompts."""
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
    """Runs the task's `call_with_cache`.

    A call with images processes the prompt; a call without images processes the tokens
    after it.

    Args:
        task: The task.
        token_ids: Integers `(B, T)`.
        cache: The `generation.Cache` before these tokens.
        cache_update_index: Position of the first token. Positions count from the
            beginning of the image.
        img_embeddings: Embeddings `(B, S, D)` of the images, or `None`.
        padding_mask: `(B, T)`, true for tokens of the prompt.

    Returns:
        `(logits, hidden_states, cache)`, with the `generation.Cache` after these
        tokens.

    Raises:
        ValueError: If `cache` is not a `Cache`.
    """
    known = generation.context(task)
    if img_embeddings is None or not isinstance(cache, generation.Cache):
        given = {}
        if img_embeddings is not None:
            given = {"img_embeddings": img_embeddings, "padding_mask": padding_mask}
        return generation.call_with_cache(
            task, token_ids, cache, cache_update_index, **given
        )
    image = ops.ones(ops.shape(img_embeddings)[:2], dtype="bool")
    prompt = ops.cast(padding_mask, "bool")
    real = prompt if known.hidden is None else prompt & ~known.hidden
    enters = ops.concatenate([image, real], axis=1)
    # Counts padding inside the prompt too, because no token is written there any more.
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


def members(cls):
    """Returns the methods for a task's carrier, if it takes images and prompts."""
    if not generation.is_causal_lm(cls):
        return {}
    if not generation.takes(cls, "_build_cache", BUILD):
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generation.make_generate_step(before="image_sequence_length"),
    }
