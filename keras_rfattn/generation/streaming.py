"""Runs chunks of tokens through a model, and checks the states passed with them."""

import json
import zlib

import keras
import numpy as np
from keras import ops

import keras_rfattn.models.generation as generation
from keras_rfattn.backend.layers import compiled_for_inference
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.decoding import empty_state
from keras_rfattn.layers.fingerprint import checksum
from keras_rfattn.models.carried import sums_up
from keras_rfattn.models.generation import (
    Cache,
    Generating,
    context,
    decodes,
    generating,
    has_states,
)
from keras_rfattn.models.holders import STREAM
from keras_rfattn.models.positions import token_limit
from keras_rfattn.models.saving import Carrier
from keras_rfattn.models.swap import original_class
from keras_rfattn.ops.state import Exact

# How many numbers of each weight a state is compared by, at least half of them.
SAMPLED = 256


def prefill(model, tokens, padding_mask=None, max_length=None):
    """Computes the logits of a first chunk of tokens, and the state after it.

    Args:
        model: A KerasHub `CausalLM` with linear attention.
        tokens: Integers `(B, T)`, with batch size B and sequence length T.
        padding_mask: Booleans `(B, T)`, true for real tokens. `None` if all tokens are
            real. Padding enters no state, wherever it is.
        max_length: Number of tokens for which softmax layers reserve keys and values.
            Only models that keep such layers need it.

    Returns:
        `(logits, state)`: logits `(B, T, vocabulary)`, and a `Cache`.

    Raises:
        ValueError: If `tokens` exceeds the model's positions or `max_length`, or if
            `max_length` is needed but missing.

    Examples:
        >>> from keras_rfattn import generation
        >>> import keras_hub
        >>> model = keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(
        ...     vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        ...     intermediate_dim=16, max_sequence_length=8))
        >>> model = keras_rfattn.replace_attention(model, "favorplus", num_features=16)
        >>> logits, state = generation.prefill(model, np.array([[1, 2, 3]]))
        >>> tuple(logits.shape)
        (1, 3, 20)
    """
    stream = check(model)
    tokens = _tokens(tokens)
    cache = generation.empty_cache(model, tokens.shape[0], max_length or 1)
    count = len(keys_and_values(cache))
    if count and max_length is None:
        raise ValueError(
            f"`max_length` must be set, because {count} layers of {title(model)} "
            "keep keys and values. Received: max_length=None. Pass the largest number "
            "of tokens that a row will contain."
        )
    cache = cache._replace(model=cache.model + stream.mark())
    return stream(tokens, cache, 0, padding_mask)


def step(model, tokens, state, padding_mask=None):
    """Computes the logits of the next tokens, and the state after them.

    Args:
        model: The model that `prefill` was called with.
        tokens: Integers `(B, T)`, one or many tokens per row.
        state: The state that `prefill` or `step` returned. It does not change and can
            be used again.
        padding_mask: Booleans `(B, T)`, true for real tokens. `None` if all tokens are
            real. Padding enters no state.

    Returns:
        `(logits, state)`: logits `(B, T, vocabulary)`, and the new `Cache`.

    Raises:
        ValueError: If the state belongs to another model or batch size, or its rows
            have seen different numbers of positions.
    """
    stream = check(model)
    tokens = _tokens(tokens)
    check_state(stream, state, tokens.shape[0])
    seen = ops.convert_to_numpy(state.seen)
    if len(set(seen.tolist())) != 1:
        raise ValueError(
            "All rows of `state` must be at the same position. Received: positions "
            f"{seen.tolist()}. Process the rows separately (`take_rows`)."
        )
    return stream(tokens, state, int(seen[0]), padding_mask)


def check(model):
    """Returns the `Stream` of a model, which is created once."""
    check_model(model)
    stream = vars(model).get(STREAM)
    if stream is not None and stream.parts == parts_of(model):
        return stream
    method = getattr(type(model), "call_with_cache", None)
    is_linear = has_states(context(model).sites)
    if method is not generation.call_with_cache or not is_linear:
        # A task made around a linear backbone still has KerasHub's own method.
        is_late = is_linear and method is not None and not isinstance(model, Carrier)
        raise TypeError(
            "`model` must be a KerasHub CausalLM with linear attention, whose only "
            f"inputs are tokens. Received: {type(model).__name__}. Call "
            f"`keras_rfattn.{'register(task)' if is_late else 'replace_attention'}` "
            "first."
        )
    # `holders.refresh` discards the stream when the model changes.
    stream = vars(model)[STREAM] = Stream(model)
    return stream


def check_type(state):
    """Raises `TypeError` unless a state is a `Cache`."""
    if not isinstance(state, Cache):
        raise TypeError(
            "`state` must be the state that `keras_rfattn.generation.prefill` returned "
            f"with the logits. Received: {type(state).__name__}."
        )


def check_state(stream, state, batch_size):
    """Checks that a state belongs to a stream's model and has a given batch size."""
    check_type(state)
    model, wanted, received = stream.model, stream.shapes, _shapes(state)
    if wanted != received:
        differs = sorted(
            k for k in wanted | received if wanted.get(k) != received.get(k)
        )
        raise ValueError(
            f"`state` must belong to {title(model)}. Received: a state in which "
            f"{differs[0]} has shape {received.get(differs[0])} without the batch "
            f"axis; the model needs {wanted.get(differs[0])}."
        )
    found = set(ops.convert_to_numpy(state.model).tolist())
    if found - {int(stream.mark())}:
        raise ValueError(
            f"`state` must belong to {title(model)} as it is now. Received: a state of "
            "a model with other weights, random vectors or options. Use that model, or "
            "call `prefill` again."
        )
    rows = {x.shape[0] for x in keras.tree.flatten(state)}
    if rows != {batch_size}:
        raise ValueError(
            "`state` must have one row for each row of tokens. Received: "
            f"{sorted(rows)} rows of state and {batch_size} of tokens. Use "
            "`take_rows` or `join_rows`."
        )


def keys_and_values(cache):
    """Returns what each layer keeps of every token: `(B, 2, S, K, H)`, or `Exact`."""
    kept = (getattr(x, "exact", x) for x in cache.layers.values())
    return [x for x in kept if not isinstance(x, tuple) or x]


def room(kept):
    """Returns for how many tokens an entry of `keys_and_values` has room."""
    return (kept.key if isinstance(kept, Exact) else kept).shape[2]


def parts_of(model):
    """Returns the ids of a model's variables, and the dtypes of its layers."""
    dtypes = [x.dtype_policy.name for x in model._flatten_layers()]
    return [id(x) for x in model.variables], dtypes


class Stream:
    """What `prefill` and `step` need of a model, and the functions they compile."""

    def __init__(self, model):
        self.model, self.sites = model, context(model).sites
        self.parts = parts_of(model)
        self.shapes, self.positions = _shapes(self.blank()), token_limit(model)
        self.options = _checksum_of_options(model, self.sites)
        self.function = compiled_for_inference(self._forward, model)
        self.sample = compiled_for_inference(self._sample, model)

    def blank(self):
        """Returns a state of one row, with room for one token and entries of 0."""
        state = generation.empty_cache(self.model, 1, 1)
        for site in self.sites:
            if sums_up(site) and decodes(site):
                state.layers[f"{site.index}"] = empty_state(site.layer, 1, 1)
        return state

    def __call__(self, tokens, state, start, padding_mask):
        """Returns `(logits, state)` for tokens that begin at position `start`."""
        hidden = None
        if padding_mask is not None:
            mask = ops.convert_to_numpy(padding_mask).astype(bool)
            if mask.shape != tuple(tokens.shape):
                raise ValueError(
                    "`padding_mask` must have the shape of `tokens`, "
                    f"{tuple(tokens.shape)}. Received: {mask.shape}."
                )
            hidden = None if mask.all() else ops.convert_to_tensor(~mask)
        self._check_room(tokens, state, start, hidden)
        start = ops.convert_to_tensor(start, dtype="int32")
        return self.function(tokens, state, start, hidden)

    def _check_room(self, tokens, state, start, hidden):
        rooms = list(map(room, keys_and_values(state)))
        softmax = [x for x in state.layers.values() if not isinstance(x, tuple)]
        if softmax and hidden is not None:
            raise ValueError(
                "`padding_mask` must hide no tokens, because softmax layers of "
                f"{title(self.model)} keep keys and values and cannot leave padding "
                "out between chunks. Received: a `padding_mask` that hides tokens. Use "
                "rows without padding (`take_rows`, `join_rows`), or make all layers "
                "linear."
            )
        end = start + tokens.shape[1]
        if self.positions is not None and end > self.positions:
            raise ValueError(
                f"`tokens` must end before position {self.positions}, the number of "
                f"learned positions of {title(self.model)} "
                f"(`max_sequence_length`). Received: tokens up to position {end}. "
                f"Extend the model: `keras_rfattn.extend_positions(model, {end})`."
            )
        if end > min(rooms, default=end):
            raise ValueError(
                f"`tokens` must end before position {min(rooms)}, because the state "
                f"has room for the keys and values of {min(rooms)} tokens. Received: "
                f"tokens up to position {end}. Pass a larger `max_length` to `prefill`."
            )

    def mark(self):
        """Returns the checksum that states of the model, as it is now, carry."""
        sample = ops.convert_to_numpy(self.sample())
        return np.int32(zlib.crc32(sample.tobytes(), self.options) & 0x7FFFFFFF)

    def _sample(self):
        return ops.concatenate([_spread(x) for x in self.model.weights])

    def _forward(self, tokens, state, start, hidden):
        known = Generating(self.sites, hidden, origin=start)
        with generating(self.model, known):
            logits, _, state = self.model.call_with_cache(tokens, state, start)
        return logits, state


def _checksum_of_options(model, sites):
    """Returns a checksum of what determines a state beside weights and tokens."""
    # Backbones leave the scale of rotary positions out of their configs.
    turning = [x for x in model._flatten_layers() if "Rotary" in type(x).__name__]
    values = [
        {
            k: x
            for k, x in layer.get_config().items()
            if k not in ("name", "trainable") and not isinstance(x, dict)
        }
        for layer in (model.backbone, *turning)
    ]
    mechanisms = [checksum(x.layer) if x.is_linear else None for x in sites]
    described = [original_class(model).__name__, values, mechanisms]
    described = json.dumps(
        described, sort_keys=True, default=lambda x: type(x).__name__
    )
    return zlib.crc32(described.encode())


def _spread(weight):
    """Returns some numbers of a weight, evenly spread, as a vector in float32."""
    x = ops.reshape(weight.value, (-1,))
    # An odd distance, so that the numbers of a matrix are not all in one column.
    return ops.cast(x[:: max(1, x.shape[0] // SAMPLED) | 1], "float32")


def named_arrays(cache):
    """Returns a dict from names such as `"3/far/maximum"` to the arrays of layers."""
    found = {}

    def visit(name, x):
        if not isinstance(x, tuple):
            found[name] = x
        elif x:
            for part, y in x._asdict().items():
                visit(f"{name}/{part}", y)

    for i, kept in cache.layers.items():
        visit(i, kept)
    return found


def _shapes(cache):
    """Returns shapes and dtypes by name, without the batch axis and key length."""
    found = {}
    for name, x in named_arrays(cache).items():
        i, _, part = name.partition("/")
        _, *shape = x.shape
        if not part or part.startswith("exact"):
            # The axis of tokens.
            del shape[len(shape) > 1]
        dtype = keras.backend.standardize_dtype(x.dtype)
        found[f"{part or 'cache'} of layer {i}"] = *shape, dtype
    return found


def _tokens(tokens):
    tokens = ops.convert_to_tensor(tokens)
    if len(tokens.shape) != 2 or 0 in tokens.shape:
        raise ValueError(
            "`tokens` must be integers of shape (B, T), with B and T at least 1. "
            f"Received: shape {tuple(tokens.shape)}."
        )
    return ops.cast(tokens, "int32")
