"""The state of fixed size for attention that is exact within windows.

The state holds the keys and values of the near windows, which the last token weighs
exactly (one, or two with `sliding`), and the sums of each near window. It also holds
the sums of all windows before them; the sums of a near window are added to those as
soon as a new window begins. Its size depends on the window alone, and windows are
counted from a row's first visible token, as in `local_attention`.

With sinks, the state also holds their keys, from which queries get their features (see
`sinks`). They stand before those of the windows. Their values are in the sums, because
each sink has a feature of its own.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import (
    clip,
    elementwise_max,
    fits,
    representable,
    take_along,
    where,
)
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    combine,
    emptied,
    merge_sums,
    no_sums,
    normalize,
    read,
    summarize,
)


class LocalState(NamedTuple):
    """Sums, keys and values of past tokens, a pytree with the batch on axis 0."""

    # As in `State`, with axis 2 for windows: entry 0 is the sum over all windows before
    # the near ones; the n near windows follow in order (n is 1, or 2 with `sliding`).
    maximum: Any  # (B, K, n + 1, M or 1)
    numerator: Any  # (B, K, n + 1, V, M); with sinks, M includes their s features
    normalizer: Any  # (B, K, n + 1, M)
    magnitude: Any  # (B, K, n + 1, M or 1)
    key: Any  # (B, K, s + n · window, H), float32: scaled keys of sinks, then near ones
    value: Any  # (B, K, n · window, V), of the near windows
    visible: Any  # (B, n · window): which of these tokens exist and are visible
    position: Any  # (B,), int32: number of tokens since the first visible one

    @property
    def num_near(self):
        """The number of tokens in the near windows, `n · window`."""
        return self.visible.shape[1]

    @property
    def sink_key(self):
        """The keys of the sinks, `(B, K, s, H)`."""
        return self.key[:, :, : self.key.shape[2] - self.num_near]

    @property
    def near_key(self):
        """The keys of the near windows, `(B, K, n · window, H)`."""
        return self.key[:, :, self.key.shape[2] - self.num_near :]


def init_local_state(
    batch_size, num_kv_heads, feature_dim, value_dim, head_dim, window, sliding=False,
    scale_dim=None, dtype="float32", sinks=0,
):  # fmt: skip
    """Returns the `LocalState` before any token; keys are kept in float32."""
    near = 2 if sliding else 1
    lead = batch_size, num_kv_heads
    kept = *lead, near * window
    width = feature_dim + sinks
    # With sinks, each feature has a scale of its own.
    scale_dim = width if sinks else scale_dim or feature_dim
    return LocalState(
        *no_sums((*lead, near + 1), width, value_dim, scale_dim),
        ops.zeros((*lead, sinks + near * window, head_dim), dtype="float32"),
        ops.zeros((*kept, value_dim), dtype=dtype),
        ops.zeros((batch_size, near * window), dtype="bool"),
        ops.zeros((batch_size,), dtype="int32"),
    )


def extend_local_state(state, key_features, value, key, key_mask=None, passed=None):
    """Returns the state with tokens `(B, S, K, ·)` added; keys are scaled."""
    # `passed` `(B, S)` is false for tokens at the end that do not count at all, such as
    # padding after a text. Key features include those of sinks.
    moved = Move(state, ops.shape(value)[:2], key_mask, passed)
    num_kv_heads, new = value.shape[2], moved.new
    features = heads_first(key_features, num_kv_heads).compute()
    value, key = (split_heads(x, num_kv_heads) for x in (value, key))
    wide = representable(value)
    old = [sums_at(state, i) for i in range(moved.near + 1)]
    empty, sums = emptied(old[0]), []
    for place in range(moved.near + 1):
        tokens, mask = (features, wide), new & (moved.place == place)
        if place and not fits(moved.length, moved.window):
            # Sums the few tokens of one window instead of all tokens of a long chunk.
            index, exists = moved.in_window(place)
            mask = take_along(new, index, axis=1) & exists
            index = ops.expand_dims(index, (1, 3))

            def take(x, index=index):
                return take_along(x, index, axis=2)

            tokens = features.of_tokens(take), take(wide)
        mask = heads_mask(mask)
        total = summarize(*admit(*tokens, mask), mask)
        for origin, part in enumerate(old):
            # A window moves towards place 0, where all far windows are summed.
            stays = elementwise_max(origin - moved.shift, 0) == place
            total = merge_sums(total, _where(stays, part, empty))
        sums.append(total)
    new = ops.expand_dims(new, 1)
    key = hide(key, new)
    visible = ops.expand_dims(state.visible, (1, 3)), ops.expand_dims(new, 3)
    return to_local_state(
        sums, moved.sinks_before(state, key, moved.keep(state.near_key, key)),
        moved.keep(state.value, hide(value, new)),
        moved.keep(*visible)[:, 0, :, 0] & moved.exists, moved.position,
    )  # fmt: skip


class Move:
    """The new places of tokens and windows after `(B, S)` tokens are added."""

    # Positions of tokens are counted from the first visible token of their row.
    def __init__(self, state, shape, key_mask, passed):
        self.near, self.length = state.maximum.shape[2] - 1, shape[1]
        self.window = window = state.num_near // self.near
        new = ops.ones(shape, "bool")
        self.new = new = new if key_mask is None else ops.cast(key_mask, "bool")
        passed = ops.ones_like(new) if passed is None else passed
        elapsed = ops.sum(ops.cast(passed, "int32"), axis=1)
        first = ops.cast(ops.argmax(ops.cast(new, "int32"), 1), "int32")
        hidden = ops.where(ops.any(new, axis=1), first, elapsed)
        # Tokens before the first visible one have positions below 0.
        offset = state.position - where(state.position > 0, 0, hidden)
        self.position = offset + elapsed
        before, own = (
            elementwise_max(x - 1, 0) // window for x in (state.position, self.position)
        )
        self.shift = own - before

        # Columns `(B, 1)`: the number of tokens so far and of those that count now, the
        # position of the first added token, and of the first slot before and after.
        starts = ((x - self.near + 1) * window for x in (before, own))
        columns = state.position, elapsed, offset, *starts
        self.old, self.elapsed, self.offset, self.start, self.new_start = (
            ops.expand_dims(x, 1) for x in columns
        )
        # Positions of the tokens in the slots of the new near windows, and which exist.
        slots = ops.arange(self.near * window, dtype="int32")
        self.slots = self.new_start + slots
        self.exists = self.counts(self.slots)
        self.kept = self.source(self.slots, self.start, self.near * window)
        # Positions of the added tokens, and their entries on axis 2 of the sums: 0
        # before the near windows, then 1 to n.
        self.added = self.offset + ops.arange(self.length, dtype="int32")
        place = (self.added - self.new_start) // window + 1
        self.place = clip(place, 0, self.near)

    def counts(self, position):
        """Returns which positions `(B, ·)` are those of tokens."""
        return (position >= 0) & (position < ops.expand_dims(self.position, 1))

    def source(self, position, start, kept):
        """Returns indices of tokens among `kept` old ones from `start` on, and new."""
        came = kept + position - self.offset
        found = ops.where(position < self.old, position - start, came)
        return clip(found, 0, kept + self.length - 1)

    def in_window(self, place):
        """Returns indices `(B, window)` of a window's added tokens, and which exist."""
        part = slice((place - 1) * self.window, place * self.window)
        index = self.slots[:, part] - self.offset
        exists = (index >= 0) & (index < self.elapsed)
        return clip(index, 0, self.length - 1), exists

    def sinks(self, state, new):
        """Returns the keys `(B, K, s, H)` of sinks, from a state and new keys."""
        old = state.sink_key
        count = old.shape[2]
        if not count:
            return old
        position = ops.expand_dims(ops.arange(count, dtype="int32"), 0)
        source = self.source(position + ops.zeros_like(self.old), 0, count)
        both = ops.concatenate([old, ops.cast(new, old.dtype)], axis=2)
        return take_along(both, ops.expand_dims(source, (1, 3)), axis=2)

    def sinks_before(self, state, new, near):
        """Returns the keys of a new state: those of sinks, then those in `near`."""
        sinks, near = self.sinks(state, new), ops.cast(near, "float32")
        return ops.concatenate([sinks, near], axis=2) if sinks.shape[2] else near

    def keep(self, old, new):
        """Returns the near slots `(B, K, n · window, ·)`, from old slots and tokens."""
        both = ops.concatenate([old, ops.cast(new, old.dtype)], axis=2)
        return take_along(both, ops.expand_dims(self.kept, (1, 3)), axis=2)


def to_local_state(sums, *rest):
    """Returns the `LocalState` with the `Sums` of far windows and of each near one."""
    sums = (ops.stack(parts, axis=2) for parts in zip(*sums, strict=True))
    return LocalState(*(ops.cast(x, "float32") for x in sums), *rest)


def sums_at(state, place):
    """Returns the `Sums` at one place of axis 2."""
    return Sums(*(x[:, :, place] for x in state[:4]))


def _where(rows, a, b):
    def choose(x, y):
        return ops.where(ops.reshape(rows, (-1, *(1,) * (len(x.shape) - 1))), x, y)

    return Sums(*(choose(x, y) for x, y in zip(a, b, strict=True)))


def read_local_state(state, query_features, query, kernel):
    """Computes attention of scaled queries to all tokens in a state."""
    num_kv_heads, value = state.key.shape[1], representable(state.value)
    features = heads_first(query_features, num_kv_heads).compute()
    far = read(sums_at(state, 0), features, value.dtype)
    length, query = ops.shape(query)[1], split_heads(query, num_kv_heads)
    visible = ops.expand_dims(state.visible, (1, 2))
    near = read_exactly(kernel, query, state.near_key, value, visible)
    output = normalize(combine(far, near), features)
    output = merge_heads(output, query_features.num_heads, length)
    return ops.cast(output, state.value.dtype)
