"""Decoding with a state of fixed size.

A prompt is processed in parallel, and later tokens are processed one after another.
"""

import contextlib
import itertools
from functools import partial

from keras import ops

from keras_rfattn.backend import wide_dtype
from keras_rfattn.layers.call_context import Interceptor, context_of
from keras_rfattn.layers.not_finite import marked, remembered
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.masks import AttentionMask, heads_mask, hide
from keras_rfattn.ops.recurrent import extend_state, init_state, read_state
from keras_rfattn.ops.sinks import Sinks
from keras_rfattn.ops.windowed_chunk import local_chunk
from keras_rfattn.ops.windowed_state import (
    Move,
    extend_local_state,
    init_local_state,
    read_local_state,
)

# Names under which attention classes store their rotary embedding layer.
ROTARY = ("rotary_embedding_layer", "rotary_embedding", "rope_layer")
# Names of the arguments by which they receive a cache.
CACHES = ("cache", "self_attention_cache")


def onward(call, state=None, passed=None):
    """Returns the output `(B, T, N, V)` of T new tokens, and the state after them."""
    feature_map, window = call.feature_map, call.options.window
    if feature_map.is_exact:
        raise ValueError(
            "Decoding with a state of fixed size needs features. Received: a map that "
            f"computes its kernel exactly ({type(feature_map).__name__}). Use another."
        )
    is_fresh = state is None
    call, finite = call.with_finite_tokens()
    if is_fresh:
        state = _empty_of(call)
    query, key, bound = call.prepared()
    key_mask = call.mask.key_mask
    if call.key.shape[1] == 1:
        output, state = _one_more(call, query, key, bound, state, passed)
    elif window is None:
        output, state = causal(
            bound.query_features(query), bound.key_features(key), call.value, key_mask,
            call.options.block_size, state=state, return_state=True,
        )  # fmt: skip
    else:
        local = call.local(query, key, bound)
        features = partial(_local_features, call)
        output, state = local_chunk(
            state, features, call.value, local, key_mask, passed, is_fresh
        )
    state = remembered(state, finite, key_mask)
    return marked(output, finite, call.mask), state


def after_prompt(call, enters, passed):
    """Returns the state after a prompt, without computing attention."""
    call, finite = call.with_finite_tokens()
    _, key, bound = call.prepared()
    state = _extended(call, key, bound, _empty_of(call), enters, passed)
    return remembered(state, finite, enters)


def _local_features(call, query, key, sink, position):
    """Returns the features of scaled tokens that `local_chunk` asks for."""
    queries = call.feature_map.query_features(query)
    keys = call.feature_map.key_features(key)
    if not call.options.sinks:
        return queries, keys
    sinks = _sinks(call, sink)
    return sinks.of_queries(queries, query), sinks.of_keys(keys, position)


def _sinks(call, key):
    """Returns the `Sinks` with keys that are heads first."""
    return Sinks(ops.transpose(key, (0, 2, 1, 3)), call.feature_map.exact_kernel)


def _one_more(call, query, key, bound, state, passed):
    """Computes `onward` of a single token."""
    state = _extended(call, key, bound, state, call.mask.key_mask, passed)
    features = bound.query_features(query)
    if call.options.window is None:
        return read_state(state, features, call.value.dtype), state
    local = call.local(query, key, bound)
    if call.options.sinks:
        features = _sinks(call, state.sink_key).of_queries(features, local.query)
    return read_local_state(state, features, local.query, local.kernel), state


def _extended(call, key, bound, state, key_mask, passed):
    """Returns a state with the tokens of a call added."""
    features, value = bound.key_features(key), call.value
    if call.options.window is None:
        return extend_state(state, features, value, key_mask)
    key = bound.side * ops.cast(key, wide_dtype(key))
    if call.options.sinks:
        moved = Move(state, ops.shape(value)[:2], key_mask, passed)
        new = hide(split_heads(key, value.shape[2]), heads_mask(moved.new))
        sinks = _sinks(call, moved.sinks(state, new))
        features = sinks.of_keys(features, moved.added)
    return extend_local_state(state, features, value, key, key_mask, passed)


def empty_state(layer, batch_size):
    """Returns the state of a linear attention layer before any token."""
    heads, head_dim = layer._kv_shape()
    sizes = batch_size, heads, head_dim, getattr(layer, "_value_dim", head_dim)
    return _empty(layer, *sizes, layer.compute_dtype)


def _empty_of(call):
    """Returns the state before any token of an `Attention`."""
    (batch, _, heads, head_dim), value_dim = ops.shape(call.key), call.value.shape[-1]
    return _empty(call, batch, heads, head_dim, value_dim, call.value.dtype)


def _empty(owner, batch, heads, head_dim, value_dim, dtype):
    feature_map, options = owner.feature_map, owner.options
    sizes = batch, heads, feature_map.output_dim, value_dim
    scale_dim = feature_map.features_per_scale
    if options.window is None:
        return init_state(*sizes, scale_dim)
    return init_local_state(
        *sizes, head_dim, options.window, options.sliding, scale_dim, dtype,
        options.sinks,
    )  # fmt: skip


class Decoder(Interceptor):
    """Recorder of a layer while it decodes, which keeps and updates its state."""

    def __init__(self, state, visible, passed, start, enters=None, is_prefix=False):
        self.state = state  # `None` before any token
        self.visible = visible  # (B, T), new tokens that others see
        self.passed = passed  # (B, T), tokens that windows count; `None` for all
        self.start = start  # position of the first new token, for rotary embeddings
        self.enters = enters  # (B, T), tokens that enter the state; `None`: the visible
        self.is_prefix = is_prefix  # whether the new tokens all see each other

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
        if self.is_prefix:
            output, self.state = looked_up(call, self.state)
        elif self.enters is not None:
            # Outputs of all tokens, because other layers may keep keys and values of
            # tokens that do not enter the state yet.
            output = call.linear()
            self.state = after_prompt(call, self.enters, self.passed)
        else:
            output, self.state = onward(call, self.state, self.passed)
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
    if state is not None and finite is not None:
        # The keys of this call are not read.
        finite = finite._replace(key=ops.ones_like(finite.key))
    if state is None:
        features = bound.key_features(key)
        state = extend_state(_empty_of(call), features, call.value, call.mask.key_mask)
        state = remembered(state, finite, call.mask.key_mask)
    features = bound.query_features(query)
    output = read_state(state, features, call.value.dtype)
    return marked(output, finite, AttentionMask(call.mask.key_mask)), state


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
