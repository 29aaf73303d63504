"""Decoding: a prompt in parallel, then token after token, with a state of one size."""

import contextlib
import itertools
from functools import partial

from keras import ops

from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.replaced_call import answering
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.recurrent import extend_state
from keras_rfattn.ops.recurrent import init_state
from keras_rfattn.ops.recurrent import read_state
from keras_rfattn.ops.windowed import Local
from keras_rfattn.ops.windowed_chunk import local_chunk
from keras_rfattn.ops.windowed_state import extend_local_state
from keras_rfattn.ops.windowed_state import init_local_state
from keras_rfattn.ops.windowed_state import read_local_state

# What attention classes call the layer that turns their queries and keys by position.
ROTARY = ("rotary_embedding_layer", "rotary_embedding", "rope_layer")
# And the cache they are given.
CACHES = ("cache", "self_attention_cache")


def onward(call, state=None, passed=None):
    """Answers tokens that come after those of a state.

    Args:
        call: A causal `layers.attend.Attention` of the new tokens alone; its
            `mask.key_mask` says which of them enter the state.
        state: `ops.State`, or `ops.LocalState` if the layer has a window; of no token
            if `None`.
        passed: `(B, T)`, for which tokens time goes on, as windows count it: all that
            enter, and padding between them; `None` for all.

    Returns:
        `(output, state)`: `(B, T, N, V)`, what each token sees of the state and of the
        new tokens up to itself, and the state after the last one.

    Raises:
        ValueError: If the map has no features.
    """
    feature_map, window = call.feature_map, call.options.window
    if feature_map.is_exact:
        raise ValueError(
            "Decoding with a state of fixed size needs features. Received: a map that "
            f"computes its kernel exactly ({type(feature_map).__name__}). Use another."
        )
    length, fresh = call.key.shape[1], state is None
    if fresh:
        (batch, _, *sizes), value_dim = ops.shape(call.key), call.value.shape[-1]
        sizes = batch, *sizes, value_dim
        state = _empty(feature_map, call.options, sizes, call.value.dtype)
    if length != 1 and window is None:
        *tokens, stats = call.prepared()
        return causal(
            *call.deferred(*tokens, stats), call.value, call.mask.key_mask,
            call.options.block_size, state=state, return_state=True,
        )  # fmt: skip
    if length == 1:
        return _one_more(call, state, passed)
    query, key, stats = call.prepared()

    def features(query, key):
        return call.deferred(query, key, stats)

    local = Local(query, key, feature_map.exact_kernel, window, call.options.sliding)
    return local_chunk(
        state, features, call.value, local, call.mask.key_mask, passed, is_empty=fresh
    )


def empty_state(layer, batch_size):
    """The state of a linear layer before any token."""
    feature_map, options = layer.feature_map, layer.options
    heads, head_dim = layer._kv_shape()
    value_dim = getattr(layer, "_value_dim", head_dim)
    return _empty(feature_map, options, (batch_size, heads, head_dim, value_dim),
                  layer.compute_dtype)  # fmt: skip


def _empty(feature_map, options, sizes, dtype):
    batch, heads, head_dim, value_dim = sizes
    sizes = batch, heads, feature_map.output_dim, value_dim
    scale_dim = feature_map.features_per_scale
    if options.window is None:
        return init_state(*sizes, scale_dim)
    return init_local_state(
        *sizes, head_dim, options.window, options.sliding, scale_dim, dtype
    )


def _one_more(call, state, passed):
    query, key, stats = call.prepared()
    key_features = call.feature_map.key_features(key, stats)
    query_features = call.feature_map.query_features(query, stats)
    if call.options.window is None:
        state = extend_state(state, key_features, call.value, call.mask.key_mask)
        return read_state(state, query_features, call.value.dtype), state
    state = extend_local_state(
        state, key_features, call.value, key, call.mask.key_mask, passed
    )
    kernel = call.feature_map.exact_kernel
    return read_local_state(state, query_features, query, kernel), state


class Decoder:
    """A layer's recorder while it decodes: answers with its state, and moves it on.

    Args:
        state: See `onward`.
        enters: `(B, T)`, which of the new tokens enter the state.
        passed: See `onward`.
        start: Position of the first new token, for rotary embeddings.
        is_prefix: Whether the new tokens, the first ones, all see each other.
    """

    def __init__(self, state, enters, passed, start, is_prefix=False):
        self.state, self.enters = state, enters
        self.passed, self.start = passed, start
        self.is_prefix = is_prefix

    def around(self, layer, function, args, kwargs):
        """The layer's call by a block that passes a cache, without that cache."""
        cache, kwargs = without_cache(kwargs)
        if cache is None:
            # Not of the decoder: an encoder of images, say.
            with context_of(layer).replace(recorder=None).active():
                return function(*args, **kwargs)
        kwargs.pop("attention_mask", None)
        causal = not self.is_prefix
        mask = AttentionMask(self.enters, causal=causal, self_attention=causal)
        with turned_from(layer, self.start):
            output = function(*args, attention_mask=mask, **kwargs)
        # Some classes always return a cache.
        return output[0] if isinstance(output, tuple) else output, cache

    def __call__(self, call):
        """The answer to an `Attention`."""
        answer = looked_up if self.is_prefix else partial(onward, passed=self.passed)
        output, self.state = answer(call, self.state)
        return output


class CrossDecoder:
    """The recorder of attention to what was encoded, which is summed up once.

    Args:
        state: `ops.State` of the encoder's tokens; `None` where they are yet to enter.
    """

    def __init__(self, state):
        self.state = state

    def around(self, layer, function, args, kwargs):
        """The layer's call by a block that passes a cache, without that cache."""
        cache, kwargs = without_cache(kwargs)
        if self.state is not None:
            # Nobody looks at them again: one is projected in place of all.
            kwargs |= {"value": kwargs["value"][:, :1], "attention_mask": None}
        return function(*args, **kwargs), cache

    def __call__(self, call):
        """The answer to an `Attention`."""
        output, self.state = looked_up(call, self.state)
        return output


def looked_up(call, state=None):
    """`(output, state)` of queries that see all of a state, at first all keys."""
    query, key, stats = call.prepared()
    if state is None:
        (batch, _, *sizes), value_dim = ops.shape(key), call.value.shape[-1]
        sizes = batch, *sizes, value_dim
        state = extend_state(
            _empty(call.feature_map, call.options, sizes, call.value.dtype),
            call.feature_map.key_features(key, stats), call.value,
            call.mask.key_mask,
        )  # fmt: skip
    features = call.feature_map.query_features(query, stats)
    return read_state(state, features, call.value.dtype), state


def without_cache(kwargs):
    """`(cache, kwargs)` of a call: the cache it was given, and what else."""
    names = (*CACHES, *(f"{x}_update_index" for x in CACHES))
    cache = next((kwargs[x] for x in CACHES if x in kwargs), None)
    return cache, {k: x for k, x in kwargs.items() if k not in names}


@contextlib.contextmanager
def turned_from(layer, start, count=None):
    """Rotary embeddings of an attention layer begin at a position meanwhile.

    Args:
        layer: The layer.
        start: Position of the first token.
        count: How many of their calls that is so for, from the first on; `None` for
            all.
    """
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
            stack.enter_context(answering(one, shifted))
        yield
