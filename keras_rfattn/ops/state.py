"""The state of an attention layer that decodes: what is far, near and exact.

    far      sums over all tokens before the near windows (all tokens without a window)
    leaving  sums over the tokens of the oldest near window, as far as the last token
             has come in its own window; they join `far` when the next window begins
    near     keys and values of the sinks, then of the near windows, in a ring: the
             token at position p has slot `p % R`
    exact    keys and values of all tokens, for the key/value heads that stay softmax

Positions count from a row's first visible token, as windows do. Parts that a layer
does not need are `()`, and none but `exact` depends on the number of tokens.

Shapes use R for the number of near slots (`window`, or `2 · window` with `sliding`) and
s for the number of sinks.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, representable
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    emptied,
    merge_sums,
    no_sums,
    normalize,
    read,
    rebase,
    summarize,
)


class Near(NamedTuple):
    """The tokens that later queries weigh exactly: s sinks, then a ring of R slots."""

    key: Any  # (B, K, s + R, H), scaled, float32
    value: Any  # (B, K, s + R, V)
    visible: Any  # (B, s + R), which slots hold a token that is visible


class Exact(NamedTuple):
    """The tokens of the E heads that stay softmax, for S positions."""

    key: Any  # (B, E, S, H), not scaled
    value: Any  # (B, E, S, V)
    visible: Any  # (B, S)


class State(NamedTuple):
    """The past tokens as a layer keeps them, a pytree with the batch on axis 0.

    Attributes:
        far: `Sums` of the keys before the near windows, in float32: `maximum`
            `(B, K, M or 1)`, `numerator` `(B, K, V, M)`, `normalizer` `(B, K, M)` and
            `magnitude`, in the shape of `maximum`.
        position: Array of shape `(B,)`, int32: number of tokens since a row's first
            visible one. Without a window, hidden tokens do not count.
        leaving: `Sums` of the tokens that join `far` when the next window begins; `()`
            without a window.
        near: `Near` tokens; `()` without a window.
        exact: `Exact` tokens; `()` if no head stays softmax.
    """

    far: Sums
    position: Any
    leaving: Any = ()
    near: Any = ()
    exact: Any = ()


def init_state(
    batch_size, num_kv_heads, feature_dim, value_dim, scale_dim=None, head_dim=None,
    local=None, dtype="float32",
):  # fmt: skip
    """Returns the state before any token.

    Args:
        batch_size: Number of sequences B.
        num_kv_heads: Number of key/value heads K with features.
        feature_dim: Feature width M.
        value_dim: Value dim V.
        scale_dim: Size of the last axis of the features' `log_scale`: M (default), or 1
            for maps whose features share one scale.
        head_dim: Head dim H of the keys; only a window needs it.
        local: Optional `Options` or `Local` with `window`, `sliding` and `sinks`.
        dtype: Dtype of the values of near tokens.

    Returns:
        A `State`.
    """
    lead = batch_size, num_kv_heads
    far = no_sums(lead, feature_dim, value_dim, scale_dim or feature_dim)
    position = ops.zeros((batch_size,), dtype="int32")
    if local is None or local.window is None:
        return State(far, position)
    slots = local.sinks + ring_size(local)
    near = Near(
        ops.zeros((*lead, slots, head_dim), dtype="float32"),
        ops.zeros((*lead, slots, value_dim), dtype=dtype),
        ops.zeros((batch_size, slots), dtype="bool"),
    )
    return State(far, position, emptied(far), near)


def ring_size(local):
    """Returns the number of near slots R."""
    return local.window * (2 if local.sliding else 1)


def sum_tokens(key_features, value, key_mask=None):
    """Returns the `Sums` of keys `(B, S, K, M)` and values `(B, S, K, V)`."""
    num_kv_heads, mask = value.shape[2], heads_mask(key_mask)
    value = split_heads(representable(value), num_kv_heads)
    return summarize(*admit(heads_first(key_features, num_kv_heads), value, mask), mask)


def add_token(sums, key_features, value, key_mask=None):
    """Returns float32 `Sums` with one token `(B, 1, K, ·)` of each row added."""
    num_kv_heads, mask = value.shape[2], heads_mask(key_mask)
    value = split_heads(representable(value), num_kv_heads)
    key, value = admit(heads_first(key_features, num_kv_heads), value, mask)
    largest = ops.stop_gradient(key.log_scale[:, :, 0])
    maximum = clip(sums.maximum, low=largest)
    kept, shift = rebase(sums, maximum), ops.expand_dims(maximum, 2)
    magnitude, rows = key.magnitudes(shift, "float32"), key.expand(shift, "float32")
    # Before any visible token, the exponent of a hidden one is the maximum.
    magnitude, rows = hide(magnitude, mask), hide(rows, mask)
    value = ops.cast(ops.swapaxes(value, -1, -2), "float32")
    return Sums(
        maximum,
        kept.numerator + value * rows,
        kept.normalizer + rows[:, :, 0],
        kept.magnitude + magnitude[:, :, 0],
    )


def in_float32(sums):
    """Returns sums as a state keeps them, in float32 for any compute dtype."""
    return Sums(*(ops.cast(x, "float32") for x in sums))


def count_visible(value, key_mask):
    """Returns how many of the values `(B, S, K, V)` are visible: `(B,)`, int32."""
    batch, length = ops.shape(value)[0], ops.shape(value)[1]
    if key_mask is None:
        return ops.broadcast_to(ops.cast(length, "int32"), (batch,))
    return ops.sum(ops.cast(key_mask, "int32"), axis=1)


def extend_state(state, key_features, value, key_mask=None):
    """Returns a state without a window, with keys and values added.

    Args:
        state: A `State`.
        key_features: `Features` of shape `(B, S, K, M)`, for any S.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional array of shape `(B, S)`, true for visible keys.

    Returns:
        The extended `State`.
    """
    if value.shape[1] == 1:
        far = add_token(state.far, key_features, value, key_mask)
    else:
        far = merge_sums(state.far, sum_tokens(key_features, value, key_mask))
    position = state.position + count_visible(value, key_mask)
    return state._replace(far=in_float32(far), position=position)


def read_state(state, query_features, dtype="float32"):
    """Computes attention of queries to all tokens in a state without a window.

    Args:
        state: A `State`.
        query_features: `Features` of shape `(B, T, N, M)`; every query sees the whole
            state.
        dtype: Compute dtype.

    Returns:
        Array of shape `(B, T, N, V)` in `dtype`. A row that sees no key is 0.
    """
    num_kv_heads = state.far.maximum.shape[1]
    query = heads_first(query_features, num_kv_heads).relative()
    products = "float32" if dtype == "float16" else dtype
    output = normalize(read(state.far, query, products), query)
    num_heads = query_features.num_heads
    length = ops.shape(output)[2] * num_kv_heads // num_heads
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def init_exact(batch_size, num_heads, max_length, head_dim, value_dim, dtype):
    """Returns `Exact` room for S = `max_length` tokens of E = `num_heads` heads."""
    lead = batch_size, num_heads, max_length
    return Exact(
        ops.zeros((*lead, head_dim), dtype=dtype),
        ops.zeros((*lead, value_dim), dtype=dtype),
        ops.zeros((batch_size, max_length), dtype="bool"),
    )


def extend_exact(exact, key, value, visible, start):
    """Returns `Exact` with the visible tokens `(B, T, E, ·)` from `start` on."""
    start = ops.convert_to_tensor(start, dtype="int32")
    zero = ops.zeros_like(start)

    def written(room, new, at, mask):
        new = ops.cast(new, room.dtype)
        old = ops.slice(room, at, ops.shape(new))
        return ops.slice_update(room, at, ops.where(mask, new, old))

    num_heads, shown = value.shape[2], ops.expand_dims(visible, (1, 3))
    key, value = (
        written(room, split_heads(x, num_heads), (zero, zero, start, zero), shown)
        for room, x in ((exact.key, key), (exact.value, value))
    )
    visible = written(exact.visible, visible, (zero, start), visible)
    return Exact(key, value, visible)


def read_exact_tokens(exact, query, kernel, start):
    """Returns attention `(B, T, E · G, V)` of tokens from `start` on to all before."""
    num_heads, num_kv_heads = query.shape[2], exact.key.shape[1]
    length, count = ops.shape(query)[1], ops.shape(exact.key)[2]
    groups = num_heads // num_kv_heads
    place = ops.arange(length * groups, dtype="int32") // groups
    place = ops.expand_dims(place + ops.cast(start, "int32"), 1)
    past = ops.expand_dims(ops.arange(count, dtype="int32"), 0) <= place
    visible = ops.expand_dims(exact.visible, (1, 2)) & past
    rows, value = split_heads(query, num_kv_heads), representable(exact.value)
    reading = read_exactly(kernel, rows, exact.key, value, visible)
    return merge_heads(normalize(reading, kernel), num_heads, length)
