"""Generation whose state does not grow: one state a linear layer, whatever the context.

KerasHub's tasks hand each attention layer its part of one cache of keys and values.
Here every layer has its own part of a `Cache`, its sums, and the task's own code runs
around a placeholder that nobody reads. Softmax layers of a mixed model keep keys and
values.
"""

import inspect
from typing import Any
from typing import NamedTuple

from keras import ops

import keras_rfattn.models.survey as survey
import keras_rfattn.models.swap as swap
from keras_rfattn.layers.call_context import PerObject
from keras_rfattn.layers.decoding import Decoder
from keras_rfattn.models.carried import carried
from keras_rfattn.models.carried import empty_layers
from keras_rfattn.models.carried import kept
from keras_rfattn.ops.recurrent import State
from keras_rfattn.ops.windowed_state import LocalState

STATES = (State, LocalState)

# Of tasks, while `generate` runs.
_GENERATING = PerObject()


class Cache(NamedTuple):
    """What a model has seen so far; a pytree with the batch on axis 0.

    Attributes:
        seen: `(B,)`, how many positions, int32. A token at an earlier one is answered,
            and does not enter a second time.
        layers: Dict of what each attention layer keeps, by its number in the model:
            `ops.State` or `ops.LocalState`, or keys and values `(B, 2, S, K, H)`.
        model: `(B,)`, a number that tells the model whose cache it is, int32; 0 inside
            of `generate`.
    """

    seen: Any
    layers: Any
    model: Any


class Generating(NamedTuple):
    """What is known while `generate` runs.

    Attributes:
        sites: `survey.Site` of each attention layer.
        hidden: `(B, T)`, padding before the last real token of each row.
        origin: Position of the first column of `hidden`.
        end: Position where generation begins: the first that some row has no token at.
    """

    sites: Any
    hidden: Any = None
    end: Any = None
    origin: Any = 0


def call_with_cache(
    task, token_ids, cache, cache_update_index, *args, before=0, **kwargs
):
    """`CausalLM.call_with_cache` of a task with linear attention.

    Args:
        task: The task.
        token_ids: Integers `(B, T)`, one token or many.
        cache: `Cache`.
        cache_update_index: Position of the first of them, or of what is before them.
        *args: Further arguments of the task's own.
        before: Number of positions that the task puts before them, as of an image.
        **kwargs: Likewise.

    Returns:
        `(logits, hidden_states, cache)`.

    Raises:
        ValueError: If `cache` is not a `Cache`.
    """
    original, known = type(task).original_class.call_with_cache, context(task)
    if not has_states(known.sites):
        return original(task, token_ids, cache, cache_update_index, *args, **kwargs)
    if not isinstance(cache, Cache):
        raise ValueError(
            f"{type(task).__name__} has linear attention, whose cache is a "
            "`keras_rfattn.generation.Cache`. Received: a cache of type "
            f"{type(cache).__name__}. Use what `_build_cache`, or "
            "`keras_rfattn.generation.prefill`, returns."
        )
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    batch, length = ops.shape(token_ids)
    enters, passed, after = entering(known, cache, batch, before + length, start)

    def decoder(state):
        return Decoder(state, enters, passed, start)

    is_hidden = hidden_keys(known, batch)
    with carried(known.sites, cache.layers, decoder, is_hidden) as (parts, blank):
        logits, hidden_states, _ = original(
            task,
            token_ids,
            blank(batch, task.compute_dtype),
            start,
            *args,
            **kwargs,
        )
    return logits, hidden_states, Cache(after, kept(parts), cache.model)


def entering(known, cache, batch, length, start):
    """Which new tokens enter states, for which time goes on, and `seen` after them.

    Args:
        known: `Generating`.
        cache: `Cache` before them.
        batch: Number of rows.
        length: Number of new tokens T of each.
        start: Position of the first of them.

    Returns:
        `(enters, passed, seen)`: booleans `(B, T)` twice, and integers `(B,)`.
    """
    positions = start + ops.arange(length, dtype="int32")
    passed, after = (
        ops.expand_dims(positions, 0) >= ops.expand_dims(cache.seen, 1),
        positions[-1] + 1,
    )
    is_prompt = not any(isinstance(x, STATES) for x in cache.layers.values())
    if known.end is not None and is_prompt:
        # The rest is not written yet.
        passed, after = passed & (positions < known.end), known.end
    enters = passed
    if known.hidden is not None:
        enters = passed & ~_hidden(known.hidden, positions - known.origin, batch)
    return enters, passed, ops.maximum(cache.seen, ops.cast(after, "int32"))


def context(task):
    """`Generating` of a task, which `generate` looks up once."""
    return _GENERATING.get(task) or Generating(survey.survey(task).sites)


def generating(task, hidden=None, end=None, origin=0, sites=None):
    """A `with` in which this thread finds a `Generating` of a task."""
    sites = survey.survey(task).sites if sites is None else sites
    return _GENERATING.giving(task, Generating(sites, hidden, end, origin))


def decodes(site):
    """Whether an attention layer is one that generates with a cache."""
    return site.causal and swap.linear_class(swap.original_class(site.layer))


def crosses(site):
    """Whether an attention layer looks at what was encoded while it generates."""
    is_known = swap.linear_class(swap.original_class(site.layer))
    return is_known and survey.is_cross(site)


def has_states(sites):
    """Whether some layer that generates is linear."""
    return any(x.is_linear and (decodes(x) or crosses(x)) for x in sites)


def empty_cache(task, batch_size, max_length):
    """The cache before any token; of linear layers there is nothing in it yet."""
    sites = [x for x in context(task).sites if decodes(x)]
    seen = ops.zeros((batch_size,), dtype="int32")
    return Cache(seen, empty_layers(sites, batch_size, max_length), 0 * seen)


def hidden_keys(known, batch):
    """`length -> (B, length)`: which of the first keys are padding, or `None`."""
    if known.hidden is None:
        return None
    return lambda length: _hidden(
        known.hidden, ops.arange(length, dtype="int32") - known.origin, batch
    )


def _hidden(hidden, positions, batch):
    """Which tokens at some positions are padding, `(B, T)`; samplers repeat rows."""
    rows, length = ops.shape(hidden)
    hidden = ops.take(hidden, ops.clip(positions, 0, length - 1), axis=1)
    # An image before them is never padding.
    hidden = hidden & (positions >= 0)
    return ops.take(hidden, ops.arange(batch) // (batch // rows), axis=0)


def build_cache(task, token_ids):
    """`CausalLM._build_cache`: the prompt, in parallel."""
    if not has_states(context(task).sites):
        return type(task).original_class._build_cache(task, token_ids)
    cache = empty_cache(task, *ops.shape(token_ids))
    _, hidden_states, cache = task.call_with_cache(token_ids, cache, 0)
    return hidden_states, cache


def generate_step(task, inputs, stop_token_ids=None):
    """`CausalLM.generate_step`, for padding wherever it is.

    Padding before the last real token of a row, on the left or in between, stays where
    it is and enters no state. A row without any token begins with the one it has.
    """
    return stepped(task, inputs, stop_token_ids, "padding_mask")


def stepped(task, inputs, stop_token_ids, name, before=None):
    """The task's own `generate_step`, told what of a prompt is padding.

    Args:
        task: The task.
        inputs: Of `generate_step`.
        stop_token_ids: Likewise.
        name: What `inputs` call the mask of the prompt.
        before: What the backbone calls the number of positions before the prompt.
    """
    original = type(task).original_class.generate_step
    sites = context(task).sites
    if not has_states(sites):
        return original(task, inputs, stop_token_ids)
    origin = 0 if before is None else getattr(task.backbone, before)
    mask = ops.cast(inputs[name], "bool")
    positions = ops.expand_dims(ops.arange(ops.shape(mask)[1], dtype="int32"), 0)
    mask = mask | (~ops.any(mask, axis=1, keepdims=True) & (positions == 0))
    last = ops.max(ops.where(mask, positions, 0), axis=1, keepdims=True)
    filled = positions <= last
    hidden = filled & ~mask
    with generating(task, hidden, origin + ops.min(last) + 1, origin, sites):
        found = original(task, {**inputs, name: filled}, stop_token_ids)
    visible = ops.cast(found[name], "bool") & ~hidden
    return {**found, name: visible}


def members(cls):
    """Methods that a task's class gets; none for tasks of more than tokens."""
    build = getattr(cls, "_build_cache", None)
    is_causal = any(base.__name__ == "CausalLM" for base in cls.__mro__)
    if not is_causal or build is None:
        return {}
    if list(inspect.signature(build).parameters) != ["self", "token_ids"]:
        return {}
    return {
        "call_with_cache": call_with_cache,
        "_build_cache": build_cache,
        "generate_step": generate_step,
    }
