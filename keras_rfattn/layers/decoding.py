"""Decoding with a state of fixed size.

A prompt is processed in parallel, and later tokens are processed one after another.
"""

import contextlib
import dataclasses
import itertools
import math
import types

from keras import ops

from keras_rfattn.layers.call_context import Interceptor, context_of
from keras_rfattn.layers.not_finite import marked, remembered
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.layers.softmax_heads import joined, linear_heads, of_heads
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.near import chunk, extend_near, read_near, turn
from keras_rfattn.ops.sink_logits import append_ones, append_sinks
from keras_rfattn.ops.state import (
    Exact,
    extend_exact,
    extend_state,
    init_exact,
    init_state,
    read_exact_tokens,
    read_state,
)

# Names under which attention classes store their rotary embedding layer.
ROTARY = ("rotary_embedding_layer", "rotary_embedding", "rope_layer")
# Names of the arguments by which they receive a cache.
CACHES = ("cache", "self_attention_cache")


def onward(call, state=None, passed=None, turns=None):
    """Returns the output `(B, T, N, V)` of T new tokens, and the state after them."""
    # `turns` are those of `turns_of`; `None` to compute the layer's own.
    if call.feature_map.is_exact:
        name = type(call.feature_map).__name__
        raise ValueError(
            "Decoding with a state of fixed size needs features. Received: a map that "
            f"computes its kernel exactly ({name}). Use another."
        )
    is_empty = state is None
    call, finite = call.with_finite_tokens()
    state = _empty_of(call) if is_empty else state
    query, key, bound = call.prepared()
    value, key_mask = call.value, call.mask.key_mask
    local = call.local(query, key, bound)
    if key.shape[1] == 1:
        features = bound.query_features(query)
        if local.window is None:
            state = extend_state(state, bound.key_features(key), value, key_mask)
            state = remembered(state, finite, key_mask)
            output = read_state(state, features, value.dtype)
        else:
            moves = (turns or {}).get(_windows(local))
            moves = turn(state, local, key_mask, passed) if moves is None else moves
            state = extend_near(state, moves, of_scaled(bound), value, local)
            state = remembered(state, finite, key_mask)
            output = read_near(state, moves, features, local, value.dtype)
        return marked(output, finite), state
    if local.window is None:
        features = bound.query_features(query), bound.key_features(key)
        output, state = causal(
            *features, value, key_mask, call.options.block_size, state=state,
            return_state=True,
        )  # fmt: skip
    else:
        tokens = of_scaled(bound), value, local, key_mask, passed
        output, state = chunk(state, *tokens, is_empty=is_empty)
    state = remembered(state, finite, key_mask)
    return marked(output, finite, call.mask), state


def turns_of(states, visible, passed):
    """Returns the `Turn` for each kind of window of `(layer, state)` pairs."""
    turns = {}
    for layer, state in states:
        windows = _windows(layer.options)
        if windows not in turns and getattr(state, "near", ()):
            turns[windows] = turn(state, layer.options, visible, passed)
    return turns


def _windows(local):
    return local.window, local.sliding, local.sinks


def of_scaled(bound):
    """Returns the features of a bound map, of tokens that `Local` has scaled."""
    return types.SimpleNamespace(
        query_features=lambda x: bound.query_features(x / bound.side),
        key_features=lambda x: bound.key_features(x / bound.side),
    )


def after_prompt(call, enters, passed):
    """Returns the state after a prompt, without computing attention."""
    call, finite = call.with_finite_tokens()
    query, key, bound = call.prepared()
    state, local = _empty_of(call), call.local(query, key, bound)
    if local.window is None:
        state = extend_state(state, bound.key_features(key), call.value, enters)
    else:
        tokens = of_scaled(bound), call.value, local, enters, passed
        _, state = chunk(state, *tokens, is_empty=True, attends=False)
    return remembered(state, finite, enters)


def empty_state(layer, batch_size, max_length):
    """Returns the state of a linear attention layer before any token."""
    heads, head_dim = layer._kv_shape()
    heads -= len(layer.options.softmax_heads)
    sizes = batch_size, heads, head_dim, _value_dim(layer), layer.compute_dtype
    exact = empty_exact(layer, batch_size, max_length)
    return _empty(layer, *sizes)._replace(exact=exact)


def empty_exact(layer, batch_size, max_length):
    """Returns room for tokens of the heads that stay softmax; `()` without any."""
    count, (_, head_dim) = len(layer.options.softmax_heads), layer._kv_shape()
    if not count:
        return ()
    sizes = batch_size, count, max_length
    return init_exact(*sizes, head_dim, _value_dim(layer), layer.compute_dtype)


def _value_dim(layer):
    return getattr(layer, "_value_dim", layer._kv_shape()[1])


def _empty_of(call):
    """Returns the state before any token of an `Attention`."""
    (batch, _, heads, head_dim), value_dim = ops.shape(call.key), call.value.shape[-1]
    return _empty(call, batch, heads, head_dim, value_dim, call.value.dtype)


def _empty(owner, batch, heads, head_dim, value_dim, dtype):
    feature_map = owner.feature_map
    return init_state(
        batch, heads, feature_map.output_dim, value_dim, feature_map.features_per_scale,
        head_dim, owner.options, dtype,
    )  # fmt: skip


def among_all(call, exact, start):
    """Returns softmax attention of new tokens to all `Exact` ones before them."""
    query, _ = call.scaled()
    # Scales the few queries instead of all keys.
    query = query * (call.logit_scale * math.sqrt(call.scale))
    key, kernel = ops.cast(exact.key, query.dtype), call.softmax_kernel
    if call.sink_logits is not None:
        query, key = append_sinks(query, call.sink_logits), append_ones(key)
        kernel = dataclasses.replace(kernel, has_offset=True)
    output = read_exact_tokens(exact._replace(key=key), query, kernel, start)
    return ops.cast(output, call.value.dtype)


class Decoder(Interceptor):
    """Recorder of a layer while it decodes, which keeps and updates its state."""

    answers_all_heads = True

    def __init__(
        self, state, visible, passed, start, enters=None, is_prefix=False, turns=None
    ):
        self.state = state  # `None` before any token
        self.visible = visible  # (B, T), new tokens that others see
        self.passed = passed  # (B, T), tokens that windows count; `None` for all
        self.start = start  # position of the first new token, for rotary embeddings
        self.enters = enters  # (B, T), tokens that enter the state; `None`: the visible
        self.is_prefix = is_prefix  # whether the new tokens all see each other
        self.turns = turns  # of `turns_of`, for a single new token

    def around(self, layer, function, args, kwargs):
        """Calls the layer without the cache that the enclosing block passes."""
        cache, kwargs = without_cache(kwargs)
        if cache is None:
            # The layer is not part of the decoder, but of an image encoder, for
            # example.
            with context_of(layer).replace(recorder=None).active():
                return function(*args, **kwargs)
        kwargs.pop("attention_mask", None)
        causal = not self.is_prefix
        mask = AttentionMask(self.visible, causal=causal, self_attention=causal)
        with turned_from(layer, self.start):
            output = function(*args, attention_mask=mask, **kwargs)
        # Some classes return a cache even if they receive none.
        return output[0] if isinstance(output, tuple) else output, cache

    def __call__(self, call):
        """Returns the output for an `Attention`, and updates the state."""
        heads = call.options.softmax_heads
        if not heads:
            return self.linear(call)
        # Before any token, only the room for keys and values exists.
        is_empty = isinstance(self.state, Exact)
        room = self.state if is_empty else self.state.exact
        self.state = None if is_empty else self.state
        output = self.linear(of_heads(call, linear_heads(call)))
        kept = of_heads(call, heads)
        room = extend_exact(room, kept.key, kept.value, self.visible, self.start)
        exact = kept.softmax() if is_empty else among_all(kept, room, self.start)
        self.state = self.state._replace(exact=room)
        return joined(call, output, exact)

    def linear(self, call):
        """Returns the output of linear heads, and updates their part of the state."""
        if self.is_prefix:
            output, self.state = looked_up(call, self.state)
        elif self.enters is not None:
            # Outputs of all tokens, because other layers may keep keys and values of
            # tokens that do not enter the state yet.
            output = call.linear()
            self.state = after_prompt(call, self.enters, self.passed)
        else:
            output, self.state = onward(call, self.state, self.passed, self.turns)
        return output


class CrossDecoder(Interceptor):
    """Recorder of cross-attention to an encoder, whose tokens are summed only once."""

    def __init__(self, state):
        self.state = state  # `None` if the encoder's tokens are not summed yet

    def around(self, layer, function, args, kwargs):
        """Calls the layer as `Decoder` does."""
        cache, kwargs = without_cache(kwargs)
        if self.state is not None:
            # The state holds the sums of all encoder tokens, so that projecting one
            # token is enough.
            kwargs |= {"value": kwargs["value"][:, :1], "attention_mask": None}
        return function(*args, **kwargs), cache

    def __call__(self, call):
        """Returns the output for an `Attention`, and sets the state."""
        output, self.state = looked_up(call, self.state)
        return output


def looked_up(call, state=None):
    """Returns attention `(B, T, N, V)` to the tokens of a `State`, and the state."""
    call, finite = call.with_finite_tokens()
    query, key, bound = call.prepared()
    if state is None:
        features = bound.key_features(key)
        state = extend_state(_empty_of(call), features, call.value, call.mask.key_mask)
        state = remembered(state, finite, call.mask.key_mask)
    features = bound.query_features(query)
    output = read_state(state, features, call.value.dtype)
    return marked(output, finite), state


def without_cache(kwargs):
    """Splits keyword arguments of a call into `(cache, other arguments)`."""
    names = (*CACHES, *(f"{x}_update_index" for x in CACHES))
    cache = next((kwargs[x] for x in CACHES if x in kwargs), None)
    return cache, {k: x for k, x in kwargs.items() if k not in names}


@contextlib.contextmanager
def turned_from(layer, start, count=None):
    """Context manager in which rotary embeddings of a layer start at a position."""
    rotary = [getattr(layer, x) for x in ROTARY if getattr(layer, x, None) is not None]

    def shifted(call):
        calls = itertools.count()

        def from_start(*args, start_index=0, **kwargs):
            if count is None or next(calls) < count:
                start_index = start_index + start
            return call(*args, start_index=start_index, **kwargs)

        return from_start

    with contextlib.ExitStack() as stack:
        for one in rotary:
            stack.enter_context(replacing_call(one, shifted))
        yield
