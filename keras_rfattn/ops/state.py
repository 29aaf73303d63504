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

from keras_rfattn.backend import (
    clip,
    elementwise_max,
    fits,
    repeat_each,
    representable,
    take_along,
    take_tokens,
    where,
)
from keras_rfattn.ops.kernel_attention import exact_attention, read_exactly
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide, needed
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    combine,
    emptied,
    merge_sums,
    no_sums,
    normalize,
    read,
    rebase,
    summarize,
)
from keras_rfattn.ops.windows import SinkTokens, in_windows


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
    """What a layer keeps of past tokens, a pytree with the batch on axis 0.

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
    slots = local.sinks + _ring(local)
    near = Near(
        ops.zeros((*lead, slots, head_dim), dtype="float32"),
        ops.zeros((*lead, slots, value_dim), dtype=dtype),
        ops.zeros((batch_size, slots), dtype="bool"),
    )
    return State(far, position, emptied(far), near)


def _ring(local):
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
    maximum = elementwise_max(sums.maximum, ops.stop_gradient(key.log_scale[:, :, 0]))
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


def read_state(state, query_features, dtype="float32", local=None):
    """Computes attention of queries to all tokens in a state.

    Args:
        state: A `State`.
        query_features: `Features` of shape `(B, T, N, M)`; every query sees the whole
            state. With a window, T is 1: the queries are those of the last token.
        dtype: Compute dtype.
        local: `Local` with the scaled queries, the kernel and the window, or `None`
            without a window.

    Returns:
        Array of shape `(B, T, N, V)` in `dtype`. A row that sees no key is 0.
    """
    if local is None:
        return read_sums(state.far, query_features, dtype)
    num_kv_heads = state.far.maximum.shape[1]
    features = heads_first(query_features, num_kv_heads).compute()
    query = split_heads(local.query, num_kv_heads)
    near, value = state.near, representable(state.near.value)
    visible = ops.expand_dims(_seen(state, local), (1, 2))
    near = read_exactly(local.kernel, query, near.key, value, visible)
    output = combine(read(state.far, features, value.dtype), near)
    output = normalize(output, features)
    output = merge_heads(output, query_features.num_heads, ops.shape(local.query)[1])
    return ops.cast(output, dtype)


def read_sums(sums, query_features, dtype):
    """Returns attention `(B, T, N, V)` of queries that see all keys of `Sums`."""
    num_kv_heads = sums.maximum.shape[1]
    query = heads_first(query_features, num_kv_heads).relative().compute()
    products = "float32" if dtype == "float16" else dtype
    output = normalize(read(sums, query, products), query)
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
    """Returns `Exact` with the visible ones of tokens `(B, T, E, ·)` from `start` on."""
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
    place = repeat_each(ops.arange(length, dtype="int32"), num_heads // num_kv_heads)
    place = ops.expand_dims(place + ops.cast(start, "int32"), 1)
    past = ops.expand_dims(ops.arange(count, dtype="int32"), 0) <= place
    visible = ops.expand_dims(exact.visible, (1, 2)) & past
    rows, value = split_heads(query, num_kv_heads), representable(exact.value)
    reading = read_exactly(kernel, rows, exact.key, value, visible)
    return merge_heads(normalize(reading, kernel), num_heads, length)


def _seen(state, local):
    """Returns which near slots the last token of each row sees, `(B, s + R)`."""
    last = ops.expand_dims(state.position, 1) - 1
    first = _first_near(last, local)
    sinks = ops.expand_dims(ops.arange(local.sinks, dtype="int32"), 0) < first
    ring = _positions(last, local) >= elementwise_max(first, 0)
    return state.near.visible & ops.concatenate([sinks, ring], axis=1)


def _first_near(last, local):
    """Returns the position at which the near windows of a token begin."""
    return (last // local.window - int(local.sliding)) * local.window


def _positions(last, local):
    """Returns the positions `(B, R)` of the tokens in the ring, up to `last`."""
    size = _ring(local)
    return last - (last - ops.arange(size, dtype="int32")) % size


def extend_by_token(state, feature_map, value, local, key_mask=None, passed=None):
    """Returns a windowed state with one token added to each row.

    The token takes the slot of the one that is R positions before it. The token that
    has its place in the oldest near window enters `leaving`.

    Args:
        state: A `State`.
        feature_map: Object with `key_features` of scaled keys.
        value: Array of shape `(B, 1, K, V)`.
        local: `Local` with the scaled keys `(B, 1, K, H)`.
        key_mask: Optional array of shape `(B, 1)`, true if the token is visible.
        passed: Optional array of shape `(B, 1)`, false if the token does not count.

    Returns:
        The extended `State`.
    """
    place = ops.expand_dims(state.position, 1)
    new = ops.ones_like(place, dtype="bool")
    new = new if key_mask is None else ops.cast(key_mask, "bool")
    # Windows count from a row's first visible token.
    counts = new | (place > 0)
    counts = counts if passed is None else counts & passed
    slots = ops.arange(_ring(local), dtype="int32")
    taken = ops.concatenate(
        [ops.expand_dims(ops.arange(local.sinks, dtype="int32"), 0) == place,
         ops.expand_dims(slots, 0) == place % _ring(local)], axis=1,
    ) & counts  # fmt: skip
    kept = ops.expand_dims(taken, (1, 3))
    num_kv_heads, near = value.shape[2], state.near
    tokens = (
        hide(split_heads(x, num_kv_heads), heads_mask(new))
        for x in (local.key, value)
    )
    key, value = (
        ops.where(kept, ops.cast(x, old.dtype), old)
        for x, old in zip(tokens, (near.key, near.value), strict=True)
    )
    near = Near(key, value, ops.where(taken, new, near.visible))

    leaves = place - local.window * int(local.sliding)
    slot = local.sinks + ops.where(leaves < 0, 0, leaves) % _ring(local)
    key, value = (
        ops.transpose(take_along(x, ops.expand_dims(slot, (1, 3)), axis=2), (0, 2, 1, 3))
        for x in (near.key, near.value)
    )
    visible = take_along(near.visible, slot, axis=1)
    visible = visible & counts & (leaves >= local.sinks)
    begins = (counts & (place % local.window == 0))[:, 0]
    far, leaving, none = state.far, state.leaving, emptied(state.far)
    far = merge_sums(far, _where(begins, leaving, none))
    leaving = _where(begins, none, leaving)
    leaving = add_token(leaving, feature_map.key_features(key), value, visible)
    position = state.position + ops.cast(counts[:, 0], "int32")
    return state._replace(far=far, position=position, leaving=leaving, near=near)


def _where(rows, a, b):
    """Returns the `Sums` a in some rows of the batch, and b in the others."""
    def choose(x, y):
        return ops.where(ops.reshape(rows, (-1, *(1,) * (len(x.shape) - 1))), x, y)

    return Sums(*(choose(x, y) for x, y in zip(a, b, strict=True)))


class Moved:
    """The positions of `shape = (B, T)` tokens that come after those of a state."""

    def __init__(self, state, shape, key_mask=None, passed=None):
        new = ops.ones(shape, "bool")
        self.new = new = new if key_mask is None else ops.cast(key_mask, "bool")
        passed = ops.ones_like(new) if passed is None else passed
        elapsed = ops.sum(ops.cast(passed, "int32"), axis=1)
        first = ops.cast(ops.argmax(ops.cast(new, "int32"), 1), "int32")
        hidden = ops.where(ops.any(new, axis=1), first, elapsed)
        # Tokens before the first visible one have positions below 0.
        offset = state.position - where(state.position > 0, 0, hidden)
        self.position = offset + elapsed
        self.added = ops.expand_dims(offset, 1) + ops.arange(shape[1], dtype="int32")
        # Which rows count tokens, `(B, 1)`.
        self.counts = ops.expand_dims(self.position > state.position, 1)


def chunk(
    state, feature_map, value, local, key_mask=None, passed=None, is_empty=False,
    attends=True,
):  # fmt: skip
    """Computes causal `local_attention` of tokens after those of a windowed state.

    The near tokens of the state and the new ones are laid out from the beginning of a
    window. Attention treats them like any sequence; far tokens enter as sums.

    Args:
        state: A `State`.
        feature_map: Object with `query_features` and `key_features` of scaled tokens.
        value: Array of shape `(B, T, K, V)`.
        local: `Local` with the scaled queries and keys.
        key_mask: Optional array of shape `(B, T)`, true for visible keys.
        passed: Optional array of shape `(B, T)`, false for tokens at the end that do
            not count at all, such as padding after a text.
        is_empty: Whether the state is known to hold no token.
        attends: Whether to compute the output.

    Returns:
        The output `(B, T, N, V)`, `None` without `attends`, and the new `State`.
    """
    moved = Moved(state, ops.shape(value)[:2], key_mask, passed)
    is_empty = is_empty or needed(state.position == 0) is None
    laid = Laid(state, moved, value, local, is_empty)
    is_far = laid.visible & (laid.token < laid.first) & (laid.token >= local.sinks)
    is_short = is_empty and fits(ops.shape(value)[1], local.window)
    output, far = None, state.far
    if attends and is_short:
        tokens = laid.query, laid.key, laid.value, local.kernel
        output = exact_attention(*tokens, laid.visible, causal=True)
    elif attends:
        features = feature_map.query_features(laid.query)
        features = features, feature_map.key_features(laid.key)
        near = local._replace(query=laid.query, key=laid.key)
        masks = needed(laid.visible), far, is_far
        output, far = in_windows(features, laid.value, near, True, *masks, laid.sinks)
    elif not is_short:
        features = feature_map.key_features(laid.key)
        far = merge_sums(far, sum_tokens(features, laid.value, is_far))
    if output is not None:
        output = take_tokens(output, laid.index(moved.added))
        # Before a row's first visible token there is nothing to see.
        output = where(ops.expand_dims(moved.added >= 0, (2, 3)), output, 0)

    leaves = laid.first + ops.arange(local.window, dtype="int32")
    key, tokens, visible = laid.at(leaves)
    last = laid.last - local.window * int(local.sliding)
    visible = visible & (leaves <= last) & (leaves >= local.sinks)
    leaving = sum_tokens(feature_map.key_features(key), tokens, visible)
    return output, state._replace(
        far=in_float32(far), position=moved.position, leaving=in_float32(leaving),
        near=laid.near(),
    )  # fmt: skip


class Laid:
    """Near tokens of a state and new ones, laid out from the beginning of a window."""

    def __init__(self, state, moved, value, local, is_empty):
        self.old, self.local, length = state.near, local, ops.shape(value)[1]
        size = _ring(local)
        kept = 0 if is_empty else size
        before = ops.expand_dims(state.position, 1)
        self.before, self.last = before, ops.expand_dims(moved.position, 1) - 1
        # Positions: of the first token that is laid out, of all, and of the first one
        # in the near windows of the last token.
        self.start = ops.zeros_like(before)
        if not is_empty:
            self.start = _first_near(elementwise_max(before - 1, 0), local)
        self.count = kept + length
        self.token = self.start + ops.arange(self.count, dtype="int32")
        self.first = _first_near(elementwise_max(self.last, 0), local)
        came = kept + self.token - moved.added[:, :1]
        source = came if is_empty else ops.where(
            self.token < before, self.token % size, came
        )  # fmt: skip
        source = clip(source, 0, self.count - 1)

        def lay_out(old, new):
            if not is_empty:
                new = ops.concatenate([ops.cast(old, new.dtype), new], axis=1)
            return take_tokens(new, source)

        def ring(x):
            return ops.transpose(x[:, :, local.sinks :], (0, 2, 1, 3))

        counts = (self.token >= 0) & (self.token <= self.last)
        visible = lay_out(self.old.visible[:, local.sinks :], moved.new) & counts
        query = local.query
        none = ops.zeros((ops.shape(query)[0], kept, *query.shape[2:]))
        shown = ops.expand_dims(visible, (2, 3))
        self.visible, self.query = visible, lay_out(none, query)
        self.key, self.value = (
            where(shown, lay_out(ring(old), new), 0)
            for old, new in ((self.old.key, local.key), (self.old.value, value))
        )
        self.sinks = self._sinks() if local.sinks else None

    def index(self, position):
        """Returns where the tokens at some positions are laid out."""
        return clip(position - self.start, 0, self.count - 1)

    def at(self, position):
        """Returns keys, values `(B, ·, K, ·)` and which are visible, at positions."""
        index, exists = self.index(position), position >= elementwise_max(self.start, 0)
        tokens = (take_tokens(x, index) for x in (self.key, self.value, self.visible))
        key, value, visible = tokens
        return key, value, visible & exists & (position <= self.last)

    def _sinks(self):
        """Returns the `SinkTokens`: those of the state, or new ones."""
        count, num_kv_heads = self.local.sinks, self.value.shape[2]
        number = ops.expand_dims(ops.arange(count, dtype="int32"), 0)
        is_old = number < self.before
        *tokens, visible = self.at(number + ops.zeros_like(self.start))
        old = (x[:, :, :count] for x in self.old[:2])
        key, value = (
            ops.where(ops.expand_dims(is_old, (1, 3)), ops.cast(x, y.dtype), y)
            for x, y in zip(
                old, (split_heads(x, num_kv_heads) for x in tokens), strict=True
            )
        )
        visible = ops.where(is_old, self.old.visible[:, :count], visible)
        return SinkTokens(key, value, visible, self.start[:, 0])

    def near(self):
        """Returns the `Near` tokens after the last one."""
        *tokens, visible = self.at(_positions(self.last, self.local))
        parts = [(*(split_heads(x, self.value.shape[2]) for x in tokens), visible)]
        if self.sinks is not None:
            parts = [self.sinks[:3], *parts]
        axes = 2, 2, 1
        parts = [
            x[0] if len(x) == 1 else ops.concatenate(x, axis)
            for x, axis in zip(zip(*parts, strict=True), axes, strict=True)
        ]
        return Near(*(ops.cast(x, y.dtype) for x, y in zip(parts, self.old, strict=True)))
