"""Tasks whose attention can be linear, but which do not generate text with it."""

import keras_rfattn.models.generation as generation


@generation.overriding("generate_step")
def refuse(task, original, known, *args, **kwargs):
    """Raises `ValueError`, because linear layers of this task keep no states."""
    name = type(task).__name__
    raise ValueError(
        f"{name} does not generate with linear attention: its caches hold more than "
        "keys and values of tokens. Received: a model with linear attention that is "
        "causal. Call `restore_attention` first, or leave the layers of the decoder "
        "out (`exclude`)."
    )


def _refused(parameters):
    return generation.Family("_build_cache", parameters, {"generate_step": refuse})


BLIP_2 = _refused(["token_ids", "projected_features", "padding_mask"])
MOONSHINE = _refused([
    "encoder_input_values", "encoder_padding_mask", "decoder_token_ids",
    "decoder_padding_mask",
])  # fmt: skip
QWEN_3_5 = _refused([
    "token_ids", "padding_mask", "img_embeddings", "vision_indices", "position_ids",
])  # fmt: skip
FAMILIES = BLIP_2, MOONSHINE, QWEN_3_5
