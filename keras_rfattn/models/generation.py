"""Generates text with one state of fixed size per linear layer.

KerasHub's tasks pass each attention layer its slice of one array of keys and values.
Here every layer has its own entry in a `Cache`: recurrent sums for a linear layer, keys
and values for a softmax layer of a mixed model. The task's own code passes a
placeholder around, which no layer reads.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

from keras import ops

import keras_rfattn.models.survey as survey
from keras_rfattn.backend import fits
from keras_rfattn.layers.call_context import PerObject
from keras_rfattn.layers.decoding import Decoder, turns_of
from keras_rfattn.models.carried import carried, empty_layers, kept
from keras_rfattn.ops.state import State

# Task -> `Generating`, while `generate` runs.
_GENERATING = PerObject()


class Cache(NamedTuple):
    """State of a model after the tokens so far; a pytree with the batch on axis 0.

    Attributes:
        seen: Number of positions seen, int32 `(B,)` for batch size B. A token at an
            earlier position gets logits, but does not enter the state a second time.
        layers: Dict from the number of an attention layer in the model, as a string,
            to its entry: `ops.State` of a linear layer, or keys and values
            `(B, 2, S, K, H)` for S positions, K key heads and head dim H.
        model: Number that identifies the model of the cache, int32 `(B,)`. It is 0
            inside `generate`.
    """

    seen: Any
    layers: Any
    model: Any


class Generating(NamedTuple):
    """What calls inside `generate` need to know about the task and its prompt."""

    sites: Any  # a `survey.Site` for each attention layer
    hidden: Any = None  # `(B, T)`, true for padding before a row's last real token
    end: Any = None  # where generation begins: some row has no token there
    origin: Any = 0  # position of the first column of `hidden`

    def padding(self, positions, batch):
        """Returns which tokens at the given positions are padding, `(B, T)`."""
        positions = positions - self.origin
        rows, length = ops.shape(self.hidden)
        hidden = ops.take(self.hidden, ops.clip(positions, 0, length - 1), axis=1)
        # Negative positions belong to an image before the prompt, which is never
        # padding.
        hidden = hidden & (positions >= 0)
        return ops.take(hidden, ops.arange(batch) // (batch // rows), axis=0)


def overriding(name):
    """Returns a decorator that makes a function override the method `name` of tasks."""

    def decorate(function):
        def method(task, *args, **kwargs):
            original = partial(getattr(type(task).original_class, name), task)
            known = context(task)
            if not has_states(known.sites):
                return original(*args, **kwargs)
            return function(task, original, known, *args, **kwargs)

        return method

    return decorate


def context(task):
    """Returns the `Generating` that `generating` set, or one without padding."""
    return _GENERATING.get(task) or Generating(survey.survey(task))


def generating(task, known):
    """Context manager in which `context(task)` is `known`, in this thread."""
    return _GENERATING.giving(task, known)


def decodes(site):
    """Returns whether a layer is causal attention, which generates with a cache."""
    return site.causal and site.linear_class


def crosses(site):
    """Returns whether a layer is cross-attention to the encoder's tokens."""
    return site.linear_class and site.self_attention is False


def has_states(sites):
    """Returns whether any layer that takes part in generation is linear."""
    return any(x.is_linear and (decodes(x) or crosses(x)) for x in sites)


def keeps_states(model, sites):
    """Returns whether a task generates, and keeps states of linear layers."""
    method = inspect.unwrap(getattr(type(model), "generate_step", None))
    return method is generate_step and has_states(sites)


@overriding("call_with_cache")
def call_with_cache(
    task, original, known, token_ids, cache, cache_update_index, *args, **kwargs
):
    """Runs the task's `call_with_cache` with its layers' own states and caches."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The cache of {type(task).__name__}, which has linear attention, must be "
            f"a `keras_rfattn.generation.Cache`. Received: a cache of type "
            f"{type(cache).__name__}. Use the result of `generation.prefill`."
        )
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    decoder, seen = decoding(known, cache, ops.shape(token_ids)[1], start)
    with carried(task, known, cache, decoder) as (parts, blank):
        if getattr(task, "caches_pairs", False):
            blank = [(blank[:, i, 0], blank[:, i, 1]) for i in range(blank.shape[1])]
        logits, states, _ = original(token_ids, blank, start, *args, **kwargs)
    return logits, states, Cache(seen, kept(parts), cache.model)


def decoding(known, cache, length, start):
    """Returns a factory of decoders of new tokens, and `Cache.seen` after them."""
    positions = start + ops.arange(length, dtype="int32")
    passed = ops.expand_dims(positions, 0) >= ops.expand_dims(cache.seen, 1)
    after, visible = positions[-1] + 1, passed
    if known.hidden is not None:
        visible = passed & ~known.padding(positions, ops.shape(passed)[0])
    decoder = partial(Decoder, visible=visible, start=start)
    if fits(length, 1):
        sites = {f"{x.index}": x.layer for x in known.sites if x.is_linear}
        pairs = [(sites[i], x) for i, x in cache.layers.items() if i in sites]
        decoder = partial(decoder, turns=turns_of(pairs, visible, passed))
    is_prompt = not any(isinstance(x, State) for x in cache.layers.values())
    if known.end is not None and is_prompt:
        # Tokens from `end` on pass again, one by one, while rows with shorter prompts
        # already generate.
        exists, after = positions < known.end, known.end
        passed = passed & exists
        decoder = partial(decoder, enters=visible & exists)
    seen = ops.maximum(cache.seen, ops.cast(after, "int32"))
    return partial(decoder, passed=passed), seen


def empty_cache(task, batch_size, max_length):
    """Returns the cache before any token, in which linear layers have no entry yet."""
    sites = [x for x in context(task).sites if decodes(x)]
    seen = ops.zeros((batch_size,), dtype="int32")
    return Cache(seen, empty_layers(sites, batch_size, max_length), 0 * seen)


def image_length(task):
    """Returns the number of tokens that an image has before the prompt."""
    return getattr(task.backbone, "image_sequence_length", 0)


@overriding("_build_cache")
def build_cache(task, original, known, token_ids, *inputs):
    """Runs the task's `_build_cache`, which processes the prompt in parallel."""
    batch, length = ops.shape(token_ids)
    cache = empty_cache(task, batch, image_length(task) + length)
    _, hidden_states, cache = task.call_with_cache(token_ids, cache, 0, *inputs)
    return hidden_states, cache


@overriding("generate_step")
def generate_step(task, original, known, inputs, stop_token_ids=None):
    """Runs the task's `generate_step`, whose prompts may have padding anywhere."""
    names = "decoder_padding_mask", "padding_mask"
    mask_name = next(name for name in names if name in inputs)
    origin, mask = image_length(task), ops.cast(inputs[mask_name], "bool")
    positions = ops.expand_dims(ops.arange(ops.shape(mask)[1], dtype="int32"), 0)
    is_empty = ~ops.any(mask, axis=1, keepdims=True)
    mask = mask | (is_empty & (positions == 0))
    last = ops.max(ops.where(mask, positions, 0), axis=1, keepdims=True)
    filled = positions <= last
    hidden = filled & ~mask
    known = Generating(known.sites, hidden, origin + ops.min(last) + 1, origin)
    with generating(task, known):
        outputs = original({**inputs, mask_name: filled}, stop_token_ids)
    # Gemma 3 returns images that it did not get, and then cannot join batches.
    outputs = {name: x for name, x in outputs.items() if x is not None}
    return {**outputs, mask_name: ops.cast(outputs[mask_name], "bool") & ~hidden}


@overriding("generate_step")
def refuse(task, original, known, *args, **kwargs):
    """Raises `ValueError`, because linear layers of this task keep no states."""
    raise ValueError(
        f"{type(task).__name__} does not generate with linear attention: its caches "
        "hold more than keys and values of tokens. Received: a model with linear "
        "attention that is causal. Call `restore_attention` first, or leave the layers "
        "of the decoder out (`exclude`)."
    )


class Family(NamedTuple):
    """Tasks of KerasHub that generate in the same way, and methods to override."""

    method: str  # by whose parameters the tasks are recognized
    parameters: str  # their names, without `self`
    members: dict  # from names of methods to the functions that override them

    def includes(self, cls):
        """Returns whether a class of tasks belongs to the family."""
        function = getattr(cls, self.method, lambda: None)
        return list(inspect.signature(function).parameters)[1:] == (
            self.parameters.split()
        )


MEMBERS = {
    "call_with_cache": call_with_cache,
    "_build_cache": build_cache,
    "generate_step": generate_step,
}
REFUSED = (
    "token_ids projected_features padding_mask",  # BLIP-2
    "encoder_input_values encoder_padding_mask decoder_token_ids "
    "decoder_padding_mask",  # Moonshine
    "token_ids padding_mask img_embeddings vision_indices position_ids",  # Qwen 3.5
)
FAMILIES = (
    Family("_build_cache", "token_ids", MEMBERS),
    # Gemma 3 has a pair of arrays for each layer instead of one array for all.
    Family(
        "_build_cache",
        "token_ids img_embeddings vision_mask padding_mask vision_indices",
        {**MEMBERS, "caches_pairs": True},
    ),
    *(Family("_build_cache", x, {"generate_step": refuse}) for x in REFUSED),
)
