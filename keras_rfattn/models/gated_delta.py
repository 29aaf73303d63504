"""Generates text with Qwen 3.5, which also has gated delta networks.

Gated delta networks, Qwen 3.5's own linear attention, keep the last inputs of a
convolution and a matrix. KerasHub lets padding enter both, and lets the last token of
the prompt enter twice. Here the prompt enters without the last token before generation
begins, because the sampler feeds this token again. Padding enters as zeros, as in a
full pass, and nothing enters for later positions.
"""

import contextlib
from typing import Any, NamedTuple

from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.models.carried import carried, kept


class Delta(NamedTuple):
    """State of all gated delta networks, the entry "delta" in `Cache.layers`.

    Attributes:
        conv: Last inputs of the convolutions, `(B, layers, channels, size - 1)`, where
            `size` is the kernel size.
        recurrent: Recurrent matrices, `(B, layers, heads, key dim, value dim)`,
            float32.
    """

    conv: Any
    recurrent: Any


def gated_layers(task):
    """Returns the gated delta networks of a task."""
    blocks = task.backbone.transformer_layers
    return [x._linear_attn for x in blocks if hasattr(x, "_linear_attn")]


def empty_cache(task, batch_size, max_length):
    """Returns `generation.empty_cache` with an entry for gated delta networks."""
    empty = generation.empty_cache(task, batch_size, max_length)
    layer = next(iter(gated_layers(task)), None)
    conv_shape, matrix_shape = (1, 1), (1, 1, 1)
    if layer is not None:
        channels = 2 * layer.key_dim + layer.value_dim
        conv_shape = channels, layer.conv_kernel_size - 1
        matrix_shape = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    start = batch_size, task.backbone.num_layers
    state = Delta(
        ops.zeros((*start, *conv_shape), dtype=task.compute_dtype),
        ops.zeros((*start, *matrix_shape), dtype="float32"),
    )
    return empty._replace(layers=empty.layers | {"delta": state})


@generation.overriding("call_with_cache")
def call_with_cache(
    task, original, known, token_ids, cache, cache_update_index, *args, **kwargs
):
    """Runs the task's `call_with_cache`.

    `generation.call_with_cache` describes the other arguments, results and errors.

    Args:
        cache: The `generation.Cache` before these tokens, or the empty cache that
            KerasHub passes first.
    """
    batch, length = ops.shape(token_ids)
    is_first = isinstance(cache_update_index, int) and cache_update_index == 0
    is_own = isinstance(cache, generation.Cache)
    if is_first and isinstance(cache, tuple) and not is_own:
        # KerasHub passes an empty cache of its own first.
        cache = empty_cache(task, batch, length)
    generation.check_cache(task, cache)
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    # The sampler feeds the last token of the prompt again, so it must not enter yet.
    count = None if known.end is None or length == 1 else known.end - 1
    known = known._replace(end=count)
    decoder, enters, seen = generation.decoding(known, cache, length, start)
    with (
        carried(task, known, cache, decoder) as (parts, blank),
        entered(task, enters, count),
    ):
        blank = ops.repeat(blank[:, :1], task.backbone.num_layers, axis=1)
        given = blank, *cache.layers["delta"]
        logits, hidden_states, states = original(
            token_ids, given, start, *args, **kwargs
        )
    layers = kept(parts) | {"delta": Delta(*states[1:])}
    return logits, hidden_states, generation.Cache(seen, layers, cache.model)


@contextlib.contextmanager
def entered(task, enters, count=None):
    """Context manager that selects the tokens that enter the gated delta networks.

    Args:
        task: The task whose networks these are.
        enters: Booleans `(B, T)`, true for tokens that enter.
        count: Number of first tokens that exist so far; `None` if all T exist. The
            networks keep the state after their last input. The existing tokens are
            therefore moved to the end, and their outputs are moved back. The outputs of
            later positions are meaningless.
    """
    length = ops.shape(enters)[1]
    positions = ops.arange(length, dtype="int32")

    def rolled(x, by):
        return ops.take(x, (positions + by) % length, axis=1)

    def around(call):
        def replacement(hidden_states, attention_mask=None, **kwargs):
            x = ops.where(enters[..., None], hidden_states, 0)
            if count is None:
                return call(x, **kwargs)
            output, state = call(rolled(x, count), **kwargs)
            return rolled(output, length - count), state

        return replacement

    with contextlib.ExitStack() as stack:
        for layer in gated_layers(task):
            stack.enter_context(replacing_call(layer, around))
        yield


FAMILY = generation.Family(
    "_build_cache",
    ["token_ids", "padding_mask", "img_embeddings", "vision_indices", "position_ids"],
    {
        "call_with_cache": call_with_cache,
        "generate_step": generation.make_generate_step(),
    },
)
