"""Generates text after an image and a prompt that see each other fully (PaliGemma).

All tokens of the image and the prompt are summed into the states first, and each of
them then reads the full sums. Generated tokens enter the states one by one, as in
`generation`.
"""

from functools import partial

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.decoding import Decoder
from keras_rfattn.models.carried import carried, kept


@generation.overriding("call_with_cache")
def call_with_cache(
    task,
    original,
    known,
    token_ids,
    cache,
    cache_update_index,
    img_embeddings=None,
    padding_mask=None,
):
    """Runs the task's `call_with_cache`."""
    if img_embeddings is None:
        logits, hidden_states, after = generation.call_with_cache(
            task, token_ids, cache, cache_update_index
        )
        return logits, hidden_states, keeping_prompts(cache, after)
    image = ops.ones(ops.shape(img_embeddings)[:2], dtype="bool")
    prompt = ops.cast(padding_mask, "bool")
    real = prompt if known.hidden is None else prompt & ~known.hidden
    enters = ops.concatenate([image, real], axis=1)
    # Counts padding inside the prompt too, because no token is written there any more.
    seen = ops.shape(image)[1] + ops.sum(ops.cast(prompt, "int32"), axis=1)
    decoder = partial(Decoder, visible=enters, passed=None, start=0, is_prefix=True)
    with carried(task, known, cache, decoder) as (parts, blank):
        logits, hidden_states, _ = original(
            token_ids, blank, 0, img_embeddings, padding_mask
        )
    return logits, hidden_states, generation.Cache(seen, kept(parts), cache.model)


def keeping_prompts(before, after):
    """Returns a `Cache` with the keys and values that its prompts had before a call."""
    layers = dict(after.layers)
    for i, x in layers.items():
        if not isinstance(x, tuple):
            positions = ops.reshape(ops.arange(x.shape[2]), (1, 1, -1, 1, 1))
            seen = ops.reshape(before.seen, (-1, 1, 1, 1, 1))
            layers[i] = ops.where(positions < seen, before.layers[i], x)
    return after._replace(layers=layers)


FAMILY = generation.Family(
    "_build_cache",
    "token_ids img_embeddings padding_mask",
    {**generation.MEMBERS, "call_with_cache": call_with_cache},
)
