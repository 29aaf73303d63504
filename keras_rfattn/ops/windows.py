"""Exact attention to near keys and features for far keys, with one normalizer.

The sequence of each row is cut into windows of `window` tokens, counted from its first
visible key. The weights of keys in a query's own window are computed exactly, by the
kernel; those of all other keys are estimated by features. With `sliding`, the window
before its own is exact too, and without causality also the one after, so that at least
`window` keys are exact. Attention is exact if the sequence fits one window.

Nothing is subtracted from a sum over all keys, because that would cancel: the sum over
the keys outside a window is computed from the keys before it and the keys after it.

`in_windows` also computes chunks of new tokens after a state, and the stretches of
several devices.

This is the local exact part of PolySketchFormer (Kacham et al., 2024, section 3.2), for
every kernel that can be computed.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_rfattn.backend import (
    by_heads,
    compiled,
    fits,
    fold,
    leading,
    product,
    repeat_each,
    representable,
    shifted,
    take_tokens,
    where,
)
from keras_rfattn.ops.kernel_attention import exact_attention, read_exactly
from keras_rfattn.ops.layout import (
    block_mask,
    block_tokens,
    cut_blocks,
    heads_first,
    in_blocks,
    join_tokens,
    merge_heads,
    split_heads,
)
from keras_rfattn.ops.masks import first_visible, hide, needed
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
        found = [shifted(blocks, x) for x in self.nearby]
        return found[0] if len(found) == 1 else ops.concatenate(found, axis=3)

    def answer(self, sums, features, query, key, value, mask, is_all, dtype):
        """Returns the output in `dtype`, from `sums` of far windows and keys nearby."""
        far = read(sums, features, value.dtype)
        visible = self.visible(mask, is_all)
        near = read_exactly(self.kernel, query, key, value, visible)
        return normalize(combine(far, near), features, dtype)

    def visible(self, mask, is_all):
        """Returns which keys nearby each query sees, `None` if it sees all of them."""
        within = None
        if self.is_causal:
            token = repeat_each(ops.arange(self.size), self.groups)
            keys = ops.arange(self.size * len(self.nearby)) + self.size * self.nearby[0]
            within = ops.expand_dims(token, 1) >= ops.expand_dims(keys, 0)
        # Windows next to a query's own may be zeros before the start or after the end.
        if is_all and within is None and len(self.nearby) == 1:
            return None
        visible = ops.swapaxes(mask, -1, -2)
        # LiteRT has no logical `and` for arrays with five axes.
        return visible if within is None else where(within, visible, False)

    def __call__(self, query_features, key_features, query, key, value, mask, earlier):
        """Computes all windows of some heads, without causality: `(B, K, T · G, V)`."""

        def cut(features, groups=1):
            features = features.compute()
            return features.of_tokens(lambda x: cut_blocks(x, self.size, groups))

        query, key, value, exists = self.cut(query, key, value, mask)
        # Keys are done before queries start, so that memory holds the features of one
        # side at a time.
        far = summarize(*admit(cut(key_features), value, mask), mask)
        far = self.elsewhere(far, earlier)
        features = cut(query_features, self.groups)
        near = (self.beside(x) for x in (key, value, exists))
        output = self.answer(far, features, query, *near, mask is None, value.dtype)
        shape = ops.shape(output)
        return ops.reshape(output, (*shape[:2], -1, shape[-1]))

    def elsewhere(self, own, earlier=None):
        """Returns each window's `Sums` over `earlier` and all windows not `nearby`."""
        none = emptied(Sums(*(x[:, :, 0] for x in own)))
        left, right = (_moved(own, none, self.nearby[i]) for i in (0, -1))
        start = none if earlier is None else cast_sums(earlier, none)
        before, _ = prefix_sums(left, start)
        after, _ = prefix_sums(_reversed(right), none)
        return merge_sums(before, _reversed(after))


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
    query, key, kernel, window, sliding = local
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
    features, value, local, is_causal, mask=None, earlier=None, far_mask=None
):
    """Computes `local_attention` of rows whose first token begins a window."""
    call = compiled(
        _causal_windows if is_causal else _all_windows, kernel=local.kernel,
        window=local.window, sliding=local.sliding,
    )  # fmt: skip
    arrays = *features, value, local.query, local.key, mask, earlier
    return call(*arrays, far_mask) if is_causal else (call(*arrays), None)


def _all_windows(
    query_features, key_features, value, query, key, mask, earlier,
    kernel, window, sliding,
):  # fmt: skip
    """Computes `in_windows` without causality."""
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups, dtype = ops.shape(value)[1], num_heads // num_kv_heads, value.dtype
    features = [heads_first(x, num_kv_heads) for x in (query_features, key_features)]
    windows = Windows(kernel, window, groups, sliding, False)
    size = product(value.shape[0], length, groups, features[1].width)
    query, key, value = (
        split_heads(x, num_kv_heads) for x in (query, key, representable(value))
    )
    mask = block_mask(mask, length, window)
    output = by_heads(windows, (*features, query, key, value, mask, earlier), size)
    # Cuts off the padding after the end.
    output = leading(output, length * groups, 2)
    return ops.cast(merge_heads(output, num_heads, length), dtype)


def _causal_windows(
    query_features, key_features, value, query, key, mask, earlier, far_mask,
    kernel, window, sliding,
):  # fmt: skip
    """Computes causal `in_windows`."""
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups, dtype = ops.shape(value)[1], num_heads // num_kv_heads, value.dtype
    windows = Windows(kernel, window, groups, sliding, True)
    far_query, compute_query = in_blocks(query_features, num_kv_heads, window, groups)
    far_key, compute_key = in_blocks(key_features, num_kv_heads, window)
    hidden = block_mask(mask, length, window)
    tokens = [split_heads(x, num_kv_heads) for x in (query, key, representable(value))]
    query, key, value, exists = windows.cut(*tokens, hidden)
    summed = exists
    if far_mask is not None:
        summed = ops.expand_dims(block_mask(far_mask, length, window), -1)
    rows = far_query, query, *map(windows.beside, (key, value, exists))

    def summed_before(offset):
        """Returns keys, values and mask of window `i + offset`, for every window i."""
        keys = keras.tree.map_structure(
            lambda x: None if x is None else shifted(x, offset), far_key
        )
        is_all = hidden is None and far_mask is None and not offset
        return keys, shifted(value, offset), None if is_all else shifted(summed, offset)

    def forward(sums, far, rows):
        keys, value, mask = far
        mask = None if mask is None else needed(mask[..., 0])
        own = summarize(*admit(compute_key(keys), value, mask), mask)
        before, last = prefix_sums(own, Sums(*sums))
        features, *rows = rows
        features, is_all = compute_query(features), hidden is None
        output = windows.answer(before, features, *rows, is_all, dtype)
        return tuple(last), block_tokens(output, num_heads)

    start = no_sums_of(key_features, ops.shape(value)[:2], value)
    start = start if earlier is None else cast_sums(earlier, start)
    blocks = summed_before(windows.nearby[0]), rows
    last, found = fold(forward, tuple(start), blocks)
    return join_tokens(found, length), Sums(*last)


def _moved(sums, none, offset):
    """Returns `Sums` in which window i has the sums of window `i + offset`, if any."""

    def move(x, y):
        y = ops.expand_dims(ops.cast(y, x.dtype), 2)
        parts = [y, x[:, :, :-1]] if offset < 0 else [x[:, :, 1:], y]
        return ops.concatenate(parts, axis=2)

    return Sums(*map(move, sums, none)) if offset else sums


def _reversed(sums):
    return Sums(*(ops.flip(x, axis=2) for x in sums))
