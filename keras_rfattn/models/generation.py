"""Generates text with one state of fixed size per linear layer.

KerasHub's tasks pass each attention layer its slice of one array of keys and values.
Here every layer has its own entry in a `Cache`: recurrent sums for a linear layer, keys
and values for a softmax layer of a mixed model. The task's own code passes a
placeholder around, which no layer reads.
"""

import inspect
from typing import Any, NamedTuple

from keras import ops

import keras_rfattn.models.survey as survey
import keras_rfattn.models.swap as swap
from keras_rfattn.layers.call_context import PerObject
from keras_rfattn.layers.decoding import Decoder
from keras_rfattn.models.carried import carried, empty_layers, kept
from keras_rfattn.ops.recurrent import State
from keras_rfattn.ops.windowed_state import LocalState

STATES = (State, LocalState)

# Task -> `Generating`, while `generate` runs.
_GENERATING = PerObject()


class Cache(NamedTuple):
    """State of a model after the tokens so far; a pytree with the batch on axis 0.

    Attributes:
        seen: Number of positions seen, int32 `(B,)` for batch size B. A token at an
            earlier position gets logits, but does not enter the state a second time.
        layers: Dict from the number of an attention layer in the model, as a string,
            to its entry: `ops.State` or `ops.LocalState` of a linear layer, or keys and
            values `(B, 2, S, K, H)` for S positions, K key heads and head dim H.
        model: Number that identifies the model of the cache, int32 `(B,)`. It is 0
            inside `generate`.

    Examples:
        >>> from keras_rfattn import generation
        >>> import keras_hub
        >>> model = keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(
        ...     vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        ...     intermediate_dim=16, max_sequence_length=8))
        >>> model = keras_rfattn.replace_attention(model, "favorplus", num_features=16)
        >>> logits, state = generation.prefill(model, np.array([[1, 2, 3]]))
        >>> isinstance(state, generation.Cache), int(state.seen[0])
        (True, 3)
    """

    seen: Any
    layers: Any
    model: Any


class Generating(NamedTuple):
    """Facts about a task and its prompt, for the calls inside `generate`.

    Attributes:
        sites: List of `survey.Site`, one for each attention layer.
        hidden: Booleans `(B, T)`, true for padding before the last real token of each
            row. `None` if there is no padding.
        origin: Position of the first column of `hidden`.
        end: Position where generation begins, which is the first position at which
            some row has no token. `None` outside `generate`.
    """

    sites: Any
    hidden: Any = None
    end: Any = None
    origin: Any = 0


def call_with_cache(
    task, token_ids, cache, cache_update_index, *args, before=0, **kwargs
):
    """Runs `CausalLM.call_with_cache` of a task with linear attention.

    Args:
        task: The task.
        token_ids: Integers `(B, T)`, one or many tokens per row.
        cache: The `Cache` before these tokens.
        cache_update_index: Position of the first token; with `before`, position of
            what comes before the tokens.
        *args: Further arguments of the task's own method.
        before: Number of positions, such as those of an image, that the task inserts
            before the tokens.
        **kwargs: Further keyword arguments of the task's own method.

    Returns:
        `(logits, hidden_states, cache)`, with the `Cache` after these tokens.

    Raises:
        ValueError: If `cache` is not a `Cache`.
    """
    original, known = type(task).original_class.call_with_cache, context(task)
    if not has_states(known.sites):
        return original(task, token_ids, cache, cache_update_index, *args, **kwargs)
    check_cache(task, cache)
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    batch, length = ops.shape(token_ids)
    enters, passed, after = entering(known, cache, batch, before + length, start)

    def decoder(state):
        return Decoder(state, enters, passed, start)

    is_hidden = hidden_keys(known, batch)
    with carried(known.sites, cache.layers, decoder, is_hidden) as (parts, blank):
        logits, hidden_states, _ = original(
            task, token_ids, blank(batch, task.compute_dtype), start, *args, **kwargs
        )
    return logits, hidden_states, Cache(after, kept(parts), cache.model)


def check_cache(task, cache):
    """Raises `ValueError` unless a cache that a task receives is a `Cache`."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The cache of {type(task).__name__}, which has linear attention, must be "
            "a `keras_rfattn.generation.Cache`. Received: a cache of type "
            f"{type(cache).__name__}. Use the result of `_build_cache` or of "
            "`keras_rfattn.generation.prefill`."
        )


def entering(known, cache, batch, length, start):
    """Determines which new tokens enter the states.

    Args:
        known: `Generating`.
        cache: The `Cache` before the new tokens.
        batch: Batch size B.
        length: Number T of new tokens per row.
        start: Position of the first new token.

    Returns:
        `(enters, passed, seen)`. `enters`, booleans `(B, T)`, is true for tokens that
        enter the states. `passed`, booleans `(B, T)`, is true for tokens that advance
        the windows: those that enter, and padding between them. `seen`, int32 `(B,)`,
        is the new `Cache.seen`.
    """
    positions = start + ops.arange(length, dtype="int32")
    passed = ops.expand_dims(positions, 0) >= ops.expand_dims(cache.seen, 1)
    after = positions[-1] + 1
    is_prompt = not any(isinstance(x, STATES) for x in cache.layers.values())
    if known.end is not None and is_prompt:
        # Positions from `end` on have no token yet.
        passed, after = passed & (positions < known.end), known.end
    enters = passed
    if known.hidden is not None:
        enters = passed & ~_hidden(known.hidden, positions - known.origin, batch)
    return enters, passed, ops.maximum(cache.seen, ops.cast(after, "int32"))


def context(task):
    """Returns the `Generating` that `generating` set, or one without padding.

    Inside `generate` this avoids a new survey of the task for each token.
    """
    return _GENERATING.get(task) or Generating(survey.survey(task).sites)


def generating(task, hidden=None, end=None, origin=0, sites=None):
    """Context manager in which `context(task)` finds a `Generating`, in this thread.

    Args:
        task: The task.
        hidden: Booleans `(B, T)`, true for padding; see `Generating`.
        end: Position where generation begins; see `Generating`.
        origin: Position of the first column of `hidden`.
        sites: List of `survey.Site`; `None` surveys the task.
    """
    sites = survey.survey(task).sites if sites is None else sites
    return _GENERATING.giving(task, Generating(sites, hidden, end, origin))


def decodes(site):
    """Returns whether a layer is causal attention, which generates with a cache."""
    return site.causal and swap.linear_class(swap.original_class(site.layer))


def crosses(site):
    """Returns whether a layer is cross-attention to the encoder's tokens."""
    is_known = swap.linear_class(swap.original_class(site.layer))
    return is_known and survey.is_cross(site)


def has_states(sites):
    """Returns whether any layer that takes part in generation is linear."""
    return any(x.is_linear and (decodes(x) or crosses(x)) for x in sites)


def empty_cache(task, batch_size, max_length):
    """Returns the cache before any token, in which linear layers have no entry yet."""
    sites = [x for x in context(task).sites if decodes(x)]
    seen = ops.zeros((batch_size,), dtype="int32")
    return Cache(seen, empty_layers(sites, batch_size, max_length), 0 * seen)


def hidden_keys(known, batch):
    """Returns a function that marks padding among the first keys of a cache.

    Returns:
        Function from a number of keys S to booleans `(B, S)`, true for padding; or
        `None` if there is no padding.
    """
    if known.hidden is None:
        return None
    return lambda length: _hidden(
        known.hidden, ops.arange(length, dtype="int32") - known.origin, batch
    )


def _hidden(hidden, positions, batch):
    """Returns which tokens at the given positions are padding, `(B, T)`.

    Samplers may repeat rows, so `hidden` may have fewer rows than the batch.
    """
    rows, length = ops.shape(hidden)
    hidden = ops.take(hidden, ops.clip(positions, 0, length - 1), axis=1)
    # Negative positions belong to an image before the prompt, which is never padding.
    hidden = hidden & (positions >= 0)
    return ops.take(hidden, ops.arange(batch) // (batch // rows), axis=0)


def build_cache(task, token_ids):
    """Runs `CausalLM._build_cache`, which processes the prompt in parallel."""
    if not has_states(context(task).sites):
        return type(task).original_class._build_cache(task, token_ids)
    cache = empty_cache(task, *ops.shape(token_ids))
    _, hidden_states, cache = task.call_with_cache(token_ids, cache, 0)
    return hidden_states, cache


def make_generate_step(mask_name="padding_mask", before=None):
    """Returns a `generate_step` for tasks whose prompts may have padding anywhere.

    Padding before the last real token of a row, on the left or in between, keeps its
    position and enters no state. A row without any real token starts from the token at
    its first position.

    Args:
        mask_name: Key of the prompt's padding mask in the inputs.
        before: Attribute of the backbone that holds the number of positions before the
            prompt, such as those of an image. `None` if there are none.

    Returns:
        A method that runs the task's own `generate_step`, and leaves padding out of the
        mask in its outputs.
    """

    def generate_step(task, inputs, stop_token_ids=None):
        original, sites = type(task).original_class.generate_step, context(task).sites
        if not has_states(sites):
            return original(task, inputs, stop_token_ids)
        origin = 0 if before is None else getattr(task.backbone, before)
        mask = ops.cast(inputs[mask_name], "bool")
        positions = ops.expand_dims(ops.arange(ops.shape(mask)[1], dtype="int32"), 0)
        is_empty = ~ops.any(mask, axis=1, keepdims=True)
        mask = mask | (is_empty & (positions == 0))
        last = ops.max(ops.where(mask, positions, 0), axis=1, keepdims=True)
        filled = positions <= last
        hidden = filled & ~mask
        with generating(task, hidden, origin + ops.min(last) + 1, origin, sites):
            outputs = original(task, {**inputs, mask_name: filled}, stop_token_ids)
        return {**outputs, mask_name: ops.cast(outputs[mask_name], "bool") & ~hidden}

    return generate_step


def takes(cls, method, parameters):
    """Returns whether a class has a method with exactly these parameters.

    KerasHub's families of tasks differ in the parameters of their methods.

    Args:
        cls: The class of a task.
        method: Name of the method.
        parameters: List of names, without `self`.
    """
    function = getattr(cls, method, None)
    if function is None:
        return False
    return list(inspect.signature(function).parameters) == ["self", *parameters]


def is_causal_lm(cls):
    """Returns whether a class is a KerasHub `CausalLM`."""
    return any(base.__name__ == "CausalLM" for base in cls.__mro__)


def members(cls):
    """Returns the methods for a task's carrier, if the task takes only tokens."""
    if not is_causal_lm(cls) or not takes(cls, "_build_cache", ["token_ids"]):
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": make_generate_step(),
    }
