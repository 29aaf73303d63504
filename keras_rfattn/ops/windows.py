"""Exact attention to near keys and features for far keys, with one normalizer.

The sequence of each row is cut into windows of `window` tokens, counted from its first
visible key. The weights of keys in a query's own window are computed exactly, by the
kernel; those of all other keys are estimated by features. With `sliding`, the window
before its own is exact too, and without causality also the one after, so that at least
`window` keys are exact. Attention is exact if the sequence fits one window.

The first `sinks` tokens of a row are exact for every query: pretrained decoders put
much of their attention on them, and features estimate these large weights badly. They
are keys nearby for each window, and no sum holds them.

Nothing is subtracted from a sum over all keys, because that would cancel: the sum over
the keys outside a window is computed from the keys before it and the keys after it.

`in_windows` also computes chunks of new tokens after a state, and the stretches of
several devices.

This is the local exact part of PolySketchFormer (Kacham et al., 2024, section 3.2), for
every kernel that can be computed. "Efficient Streaming Language Models with Attention
Sinks" (Xiao et al., 2024) keeps the first tokens beside a sliding window.
"""

import dataclasses
from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import (
    by_heads,
    clip,
    compiled,
    fits,
    fold,
    num_blocks,
    product,
    representable,
    take_tokens,
    where,
)
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.kernel_attention import exact_attention, read_exactly
from keras_rfattn.ops.layout import (
    block_mask,
    cut_blocks,
    features_in_blocks,
    heads_first,
    join_blocks,
    split_heads,
)
from keras_rfattn.ops.masks import first_visible, heads_mask, hide, needed
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.prefix_sums import prefix_sums
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    cast_sums,
    combine,
    emptied,
    merge_sums,
    no_sums_of,
    normalize,
    read,
    summarize,
)


class Local(NamedTuple):
    """The tokens and the kernel for the exact part of attention."""

    query: Any  # (B, T, N, H), scaled
    key: Any  # (B, S, K, H), scaled
    kernel: Any  # that the features estimate: `Softmax()` or `Polynomial(degree)`
    window: int  # number of tokens in a window
    sliding: bool = False  # whether the windows next to a query's own are exact too
    sinks: int = 0  # number of first tokens that are exact for every query


class SinkTokens(NamedTuple):
    """The keys and values of sinks, and where the windows begin that see them."""

    key: Any  # (B, K, s, H), scaled
    value: Any  # (B, K, s, V)
    visible: Any  # (B, s), which of them exist and are visible
    start: Any  # (B,), position of the first token of the first window

    def before(self, windows, count):
        """Returns which sinks are before the windows nearby: `(B, 1, n, 1, s)`."""
        number = ops.arange(count, dtype="int32") + windows.nearby[0]
        first = ops.expand_dims(self.start, 1) + number * windows.size
        seen = ops.expand_dims(first > 0, -1) & ops.expand_dims(self.visible, 1)
        return ops.expand_dims(seen, (1, 3))


@dataclasses.dataclass(frozen=True)
class Windows:
    """The settings of windowed attention, and its computation."""

    kernel: Any
    size: int  # number of tokens in a window, C
    groups: int  # G, query heads per key head
    sliding: bool
    is_causal: bool

    @property
    def nearby(self):
        """Offsets from a query's own window of the windows it weighs exactly."""
        after = self.sliding and not self.is_causal
        return range(-1 if self.sliding else 0, 2 if after else 1)

    def cut(self, query, key, value, mask):
        """Cuts tokens, heads first, into n windows: `(query, key, value, exists)`."""
        query = cut_blocks(query, self.size, self.groups)
        key, value = (hide(cut_blocks(x, self.size), mask) for x in (key, value))
        if mask is None:
            mask = ops.ones((1, 1, *ops.shape(value)[2:4]), dtype="bool")
        return query, key, value, ops.expand_dims(mask, -1)

    def beside(self, blocks):
        """Returns each window together with the windows nearby, side by side."""
        found = [_shifted(blocks, x) for x in self.nearby]
        return found[0] if len(found) == 1 else ops.concatenate(found, axis=3)

    def answer(self, sums, features, query, near, sinks, is_all, dtype):
        """Returns the output in `dtype`, from `sums` of far windows and keys nearby."""
        key, value, mask = near
        far = read(sums, features, value.dtype)
        visible = self.visible(mask, is_all)
        if sinks is not None:
            key, value, visible = _joined(query, (key, value, visible), sinks)
        near = read_exactly(self.kernel, query, key, value, visible)
        return normalize(combine(far, near), features, dtype)

    def visible(self, mask, is_all):
        """Returns which keys nearby each query sees, `None` if it sees all of them."""
        within = None
        if self.is_causal:
            token = ops.arange(self.size * self.groups) // self.groups
            keys = ops.arange(self.size * len(self.nearby)) + self.size * self.nearby[0]
            within = ops.expand_dims(token, 1) >= ops.expand_dims(keys, 0)
        # Windows next to a query's own may be zeros before the start or after the end.
        if is_all and within is None and len(self.nearby) == 1:
            return None
        visible = ops.swapaxes(mask, -1, -2)
        # LiteRT has no logical `and` for arrays with five axes.
        return visible if within is None else where(within, visible, False)

    def __call__(
        self, query_features, key_features, query, key, value, mask, summed, sinks,
        earlier,
    ):  # fmt: skip
        """Returns the output `(B, K, n, C · G, V)` of some heads, without causality."""

        def cut(features, groups=1):
            features = features.compute()
            return features.of_tokens(lambda x: cut_blocks(x, self.size, groups))

        query, key, value, exists = self.cut(query, key, value, mask)
        # Keys are done before queries start, so that memory holds the features of one
        # side at a time.
        far = summarize(*admit(cut(key_features), value, summed), summed)
        far = self.elsewhere(far, earlier)
        features = cut(query_features, self.groups)
        near = [self.beside(x) for x in (key, value, exists)]
        is_all = mask is None
        return self.answer(far, features, query, near, sinks, is_all, value.dtype)

    def elsewhere(self, own, earlier=None):
        """Returns each window's `Sums` over `earlier` and all windows not `nearby`."""
        none = emptied(Sums(*(x[:, :, 0] for x in own)))
        left, right = (_shifted_sums(own, self.nearby[i]) for i in (0, -1))
        start = none if earlier is None else cast_sums(earlier, none)
        before, _ = prefix_sums(left, start)
        after, _ = prefix_sums(_reversed(right), none)
        return merge_sums(before, _reversed(after))


def _joined(query, near, sinks):
    """Returns keys, values and what is visible of tokens nearby and of sinks."""
    count, rows = ops.shape(query)[2:4]

    def beside(x, sink):
        sink = ops.expand_dims(ops.cast(sink, x.dtype), 2)
        shape = *ops.shape(sink)[:2], count, *ops.shape(sink)[3:]
        return ops.concatenate([x, ops.broadcast_to(sink, shape)], axis=3)

    (key, value, visible), (sink_key, sink_value, seen) = near, sinks
    if visible is None:
        visible = ops.ones((1, 1, 1, 1, ops.shape(key)[3]), dtype="bool")
    lead = ops.shape(query)[0], 1, count, rows
    visible = [ops.broadcast_to(x, (*lead, ops.shape(x)[-1])) for x in (visible, seen)]
    key, value = beside(key, sink_key), beside(value, sink_value)
    return key, value, ops.concatenate(visible, axis=-1)


def first_tokens(key, value, count, key_mask=None):
    """Returns the `SinkTokens` of keys and values `(B, T, K, ·)`."""
    (batch, length), num_kv_heads = ops.shape(value)[:2], value.shape[2]
    if key_mask is None:
        visible = ops.ones((batch, count), dtype="bool")
        key, value = key[:, :count], value[:, :count]
    else:
        place = first_visible(key_mask) + ops.arange(count, dtype="int32")
        # A row with fewer tokens has fewer sinks.
        index = clip(place, 0, length - 1)
        visible = take_tokens(ops.cast(key_mask, "bool"), index) & (place < length)
        key, value = (take_tokens(x, index) for x in (key, value))
    mask, start = heads_mask(visible), ops.zeros((batch,), dtype="int32")
    key, value = (hide(split_heads(x, num_kv_heads), mask) for x in (key, value))
    return SinkTokens(key, value, visible, start)


def from_first_visible(key_mask, causal=False):
    """Returns functions that rotate rows so that the first visible key comes first."""
    length, first = ops.shape(key_mask)[1], first_visible(key_mask)
    positions = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
    forward, back = (positions + first) % length, (positions - first) % length

    def turn_back(output):
        output = take_tokens(output, back)
        if not causal:
            return output
        return where(ops.expand_dims(positions >= first, (2, 3)), output, 0)

    return lambda x: take_tokens(x, forward), turn_back


def local_attention(
    query_features, key_features, value, local, key_mask=None, causal=False
):
    """Computes self-attention, exact within windows and by features beyond."""
    # Without causality, tokens before the first visible key, which are padding, count
    # as being after the end.
    query, key, kernel, window, sliding, _ = local
    Options(window=window, sliding=sliding)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "A `window` needs self-attention, where queries and keys are the same "
            f"tokens. Received: window={window}, {query.shape[1]} queries and "
            f"{key.shape[1]} keys. Leave cross-attention out (`exclude=`)."
        )
    if fits(key.shape[1], window):
        return exact_attention(query, key, value, kernel, key_mask, causal)
    features = query_features, key_features
    if key_mask is None:
        return in_windows(features, value, local, causal)[0]
    turn, turn_back = from_first_visible(key_mask, causal)
    local = local._replace(query=turn(query), key=turn(key))
    features = [x.of_tokens(turn) for x in features]
    output, _ = in_windows(features, turn(value), local, causal, turn(key_mask))
    return turn_back(output)


def in_windows(
    features, value, local, is_causal, mask=None, earlier=None, summed=None, sinks=None
):
    """Returns the output for rows that begin a window, and the sums of far windows."""
    if local.sinks and sinks is None:
        sinks = first_tokens(local.key, value, local.sinks, mask)
        position = ops.arange(ops.shape(value)[1], dtype="int32")
        summed = ops.expand_dims(position >= local.sinks, 0)
        summed = summed if mask is None else summed & ops.cast(mask, "bool")
    elif summed is None:
        summed = mask
    groups = local.query.shape[2] // local.key.shape[2]
    windows = Windows(local.kernel, local.window, groups, local.sliding, is_causal)
    call = compiled(_causal_windows if is_causal else _all_windows, windows=windows)
    arrays = value, local.query, local.key, mask, summed, sinks, earlier
    return call(*features, *arrays)


def _all_windows(
    query_features, key_features, value, query, key, mask, summed, sinks, earlier,
    windows,
):  # fmt: skip
    """Computes `in_windows` without causality."""
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups, dtype = ops.shape(value)[1], windows.groups, value.dtype
    features = [heads_first(x, num_kv_heads) for x in (query_features, key_features)]
    size = product(value.shape[0], length, groups, features[1].width)
    query, key, value = (
        split_heads(x, num_kv_heads) for x in (query, key, representable(value))
    )
    masks = [block_mask(x, length, windows.size) for x in (mask, summed)]
    if sinks is not None:
        seen = sinks.before(windows, num_blocks(length, windows.size))
        sinks = sinks.key, sinks.value, seen
    arrays = *features, query, key, value, *masks, sinks, earlier
    output = join_blocks(by_heads(windows, arrays, size), num_heads, length)
    return ops.cast(output, dtype), None


def _causal_windows(
    query_features, key_features, value, query, key, mask, summed, sinks, earlier,
    windows,
):  # fmt: skip
    """Computes causal `in_windows`."""
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, size, dtype = ops.shape(value)[1], windows.size, value.dtype
    far_query = features_in_blocks(query_features, num_kv_heads, size, windows.groups)
    far_key = features_in_blocks(key_features, num_kv_heads, size)
    weights = far_query.shared(), far_key.shared()
    hidden = block_mask(mask, length, size)
    tokens = [split_heads(x, num_kv_heads) for x in (query, key, representable(value))]
    query, key, value, exists = windows.cut(*tokens, hidden)
    rows = far_query.tokens(), query, list(map(windows.beside, (key, value, exists)))
    seen = None if sinks is None else sinks.before(windows, ops.shape(value)[2])
    # Keys, values and mask of the window that is far from the next one on.
    offset, summed = windows.nearby[0], block_mask(summed, length, size)
    if summed is None and offset:
        summed = exists[..., 0]
    leaving = (
        far_key.tokens().of_tokens(lambda x: _shifted(x, offset)),
        *(None if x is None else _shifted(x, offset) for x in (value, summed)),
    )

    def forward(sums, leaving, rows, seen):
        key, value, mask = leaving
        mask = needed(mask)
        key = key.joined(weights[1]).compute()
        own = summarize(*admit(key, value, mask), mask)
        before, last = prefix_sums(own, Sums(*sums))
        features, query, near = rows
        features, is_all = features.joined(weights[0]).compute(), hidden is None
        exact = None if sinks is None else (sinks.key, sinks.value, seen)
        output = windows.answer(before, features, query, near, exact, is_all, dtype)
        return tuple(last), output

    start = no_sums_of(key_features, ops.shape(value)[:2], value)
    start = start if earlier is None else cast_sums(earlier, start)
    last, found = fold(forward, tuple(start), (leaving, rows, seen))
    return join_blocks(found, num_heads, length), Sums(*last)


def _shifted(blocks, offset, outside=0):
    """Returns blocks along axis 2: block i is block `i + offset`, if that exists."""
    if offset == 0:
        return blocks
    batch, heads, count, rows, *rest = ops.shape(blocks)
    # LiteRT joins arrays of at most five axes.
    flat = ops.reshape(blocks, (batch, heads, count * rows, *rest))
    edge = ops.full_like(flat[:, :, :rows], outside)
    parts = [edge, flat[:, :, :-rows]] if offset < 0 else [flat[:, :, rows:], edge]
    return ops.reshape(ops.concatenate(parts, axis=2), ops.shape(blocks))


def _shifted_sums(sums, offset):
    """Returns `Sums` of which those of window i are those of window `i + offset`."""
    rest = (_shifted(x, offset) for x in sums[1:])
    return Sums(_shifted(sums.maximum, offset, LOWEST), *rest)


def _reversed(sums):
    return Sums(*(ops.flip(x, axis=2) for x in sums))
