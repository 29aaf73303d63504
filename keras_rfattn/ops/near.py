"""Windowed decoding: a state's ring of near tokens, and the sums of those that leave.

A token reads the ring exactly and the far tokens by features (`extend_near`, then
`read_near`). Many tokens at once are laid out after those in the ring, and attention
treats them like any sequence (`chunk`).

`feature_map` has `query_features` and `key_features` of scaled tokens, which `local`
holds. `key_mask`, `(B, T)`, is true for visible keys, and `passed`, `(B, T)`, false for
tokens at the end that do not count at all, such as padding after a text.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, fits, representable, take_tokens, where
from keras_rfattn.ops.kernel_attention import exact_attention, read_exactly
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide, needed
from keras_rfattn.ops.state import Near, add_token, in_float32, ring_size, sum_tokens
from keras_rfattn.ops.sums import Sums, combine, emptied, merge_sums, normalize, read
from keras_rfattn.ops.windows import SinkTokens, in_windows


def _first_near(last, local):
    """Returns the position at which the near windows of a token begin."""
    return (last // local.window - int(local.sliding)) * local.window


def _positions(last, local):
    """Returns the positions `(B, R)` of the tokens in the ring, up to `last`."""
    size = ring_size(local)
    return last - (last - ops.arange(size, dtype="int32")) % size


class Turn(NamedTuple):
    """What one more token changes in a windowed state, equal in all layers."""

    new: Any  # (B, 1), whether the token is visible
    taken: Any  # (B, 1, s + R, 1), near slots that it takes
    visible: Any  # (B, s + R), near slots that hold a visible token afterwards
    seen: Any  # (B, 1, 1, s + R), near slots that it sees
    slot: Any  # (B, 1), near slot of the token that enters `leaving`
    leaves: Any  # (B, 1), whether there is such a token, and it is visible
    begins: Any  # (B, 1, 1), whether a window begins
    position: Any  # (B,), the position afterwards


def turn(state, local, key_mask=None, passed=None):
    """Returns the `Turn` of one more token of each row."""
    # The token takes the slot of the one that is R positions before it, and the token
    # that has its place in the oldest near window enters `leaving`.
    place, size = ops.expand_dims(state.position, 1), ring_size(local)
    new = ops.ones_like(place, dtype="bool")
    new = new if key_mask is None else ops.cast(key_mask, "bool")
    # Windows count from a row's first visible token.
    counts = new | (place > 0)
    counts = counts if passed is None else counts & passed
    sinks = ops.expand_dims(ops.arange(local.sinks, dtype="int32"), 0)
    ring = ops.expand_dims(ops.arange(size, dtype="int32"), 0)
    taken = ops.concatenate([sinks == place, ring == place % size], axis=1) & counts
    visible = ops.where(taken, new, state.near.visible)
    leaves = place - local.window * int(local.sliding)
    slot = local.sinks + ops.where(leaves < 0, 0, leaves) % size
    is_left = take_tokens(visible, slot) & counts & (leaves >= local.sinks)
    begins = ops.expand_dims(counts & (place % local.window == 0), -1)
    position = state.position + ops.cast(counts[:, 0], "int32")
    last = ops.expand_dims(position, 1) - 1
    first = _first_near(last, local)
    near = _positions(last, local) >= ops.maximum(first, 0)
    seen = visible & ops.concatenate([sinks < first, near], axis=1)
    taken, seen = ops.expand_dims(taken, (1, 3)), ops.expand_dims(seen, (1, 2))
    return Turn(new, taken, visible, seen, slot, is_left, begins, position)


def read_near(state, turn, query_features, local, dtype="float32"):
    """Returns attention `(B, 1, N, V)` of the last token to all tokens in a state."""
    num_kv_heads = state.far.maximum.shape[1]
    features = heads_first(query_features, num_kv_heads)
    query = split_heads(local.query, num_kv_heads)
    near, value = state.near, representable(state.near.value)
    near = read_exactly(local.kernel, query, near.key, value, turn.seen)
    output = combine(read(state.far, features, value.dtype), near)
    output = normalize(output, features)
    output = merge_heads(output, query_features.num_heads, ops.shape(local.query)[1])
    return ops.cast(output, dtype)


def extend_near(state, turn, feature_map, value, local):
    """Returns a windowed state with one token `(B, 1, K, ·)` added to each row."""
    num_kv_heads, mask = value.shape[2], heads_mask(turn.new)
    tokens = (hide(split_heads(x, num_kv_heads), mask) for x in (local.key, value))
    key, value = (
        ops.where(turn.taken, ops.cast(x, old.dtype), old)
        for x, old in zip(tokens, state.near[:2], strict=True)
    )
    near = Near(key, value, turn.visible)
    key, value = (
        take_tokens(ops.transpose(x, (0, 2, 1, 3)), turn.slot) for x in (key, value)
    )
    far, leaving, none = state.far, state.leaving, emptied(state.far)
    far = merge_sums(far, _where(turn.begins, leaving, none))
    leaving = _where(turn.begins, none, leaving)
    leaving = add_token(leaving, feature_map.key_features(key), value, turn.leaves)
    return state._replace(far=far, position=turn.position, leaving=leaving, near=near)


def _where(rows, a, b):
    """Returns the `Sums` a in some rows `(B, 1, 1)`, and b in the others."""
    columns = ops.expand_dims(rows, -1)
    return Sums(
        ops.where(rows, a.maximum, b.maximum),
        ops.where(columns, a.numerator, b.numerator),
        ops.where(rows, a.normalizer, b.normalizer),
        ops.where(rows, a.magnitude, b.magnitude),
    )


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
    """Returns the output of tokens after those of a state, and the next state."""
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
        size = ring_size(local)
        kept = 0 if is_empty else size
        before = ops.expand_dims(state.position, 1)
        self.before, self.last = before, ops.expand_dims(moved.position, 1) - 1
        # Positions: of the first token that is laid out, of all, and of the first one
        # in the near windows of the last token.
        self.start = ops.zeros_like(before)
        if not is_empty:
            self.start = _first_near(clip(before - 1, low=0), local)
        self.count = kept + length
        self.token = self.start + ops.arange(self.count, dtype="int32")
        self.first = _first_near(clip(self.last, low=0), local)
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
        index, exists = self.index(position), position >= clip(self.start, low=0)
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
        return Near(
            *(ops.cast(x, y.dtype) for x, y in zip(parts, self.old, strict=True))
        )
