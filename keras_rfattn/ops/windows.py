"""Attention in windows whose first window begins at the first token of the sequence.

Attention is exact inside a window, and uses sums of features for the other windows.
`local_attention`, chunks of new tokens after a state, and the stretches of several
devices are built from it.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_rfattn.backend import (
    by_heads,
    fold,
    leading,
    product,
    repeat_each,
    representable,
    shifted,
    where,
)
from keras_rfattn.ops.deferred import Deferred
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.layout import (
    block_mask,
    block_tokens,
    cut_blocks,
    heads_first,
    in_blocks,
    join_tokens,
    merge_heads,
    one_block,
    split_heads,
)
from keras_rfattn.ops.masks import hide, needed
from keras_rfattn.ops.prefix_sums import prefix_sums
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    cast_sums,
    combine,
    merge_sums,
    no_sums,
    normalize,
    read,
    summarize,
)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The settings of windowed attention, and its computation.

    Attributes:
        kernel: `Softmax()` or `Polynomial(degree)`: the kernel that the features
            estimate.
        size: Number of tokens in a window, C.
        groups: G, query heads per key head, which are adjacent rows of a token.
        sliding: Whether the windows next to a query's own are exact too.
        is_causal: Whether a query sees no key after its own token.
    """

    kernel: Any
    size: int
    groups: int
    sliding: bool
    is_causal: bool

    @property
    def nearby(self):
        """Offsets from a query's own window of the windows it weighs exactly."""
        after = self.sliding and not self.is_causal
        return range(-1 if self.sliding else 0, 2 if after else 1)

    def cut(self, query, key, value, mask):
        """Cuts tokens into n windows: returns `(query, key, value, exists)`.

        Args:
            query: Array of shape `(B, K, T · G, H)`.
            key: Array of shape `(B, K, T, H)`.
            value: Array of shape `(B, K, T, V)`.
            mask: Booleans of shape `(B, 1, n, C)`, or `None` if all keys exist.

        Returns:
            Queries `(B, K, n, C · G, H)`, keys and values `(B, K, n, C, ·)` in which
            hidden rows are 0, and booleans `(B, 1, n, C, 1)` of the keys that exist.
        """
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
        """Returns the output, from sums for far windows and exactly for those nearby.

        Args:
            sums: `Sums` of what is far from each window.
            features: `Features` of the queries of shape `(B, K, n, C · G, M)`.
            query: Queries of shape `(B, K, n, C · G, H)`.
            key: Keys nearby, as returned by `beside`.
            value: Values nearby, as returned by `beside`.
            mask: Booleans nearby, as returned by `beside`.
            is_all: Whether no key is hidden.
            dtype: Dtype of the result.
        """
        far = read(sums, features, value.dtype)
        visible = self.visible(mask, is_all)
        near = read_exactly(self.kernel, query, key, value, visible)
        return normalize(combine(far, near), features, dtype)

    def visible(self, mask, is_all):
        """Returns which keys nearby each query sees, `None` if it sees all of them.

        Args:
            mask: Booleans nearby, as returned by `beside`.
            is_all: Whether no key is hidden.
        """
        within = self._within() if self.is_causal else None
        # Windows next to a query's own may be zeros before the start or after the end.
        if is_all and within is None and len(self.nearby) == 1:
            return None
        visible = ops.swapaxes(mask, -1, -2)
        # LiteRT has no logical `and` for arrays with five axes.
        return visible if within is None else where(within, visible, False)

    def _within(self):
        """Returns `(C · G, C · len(nearby))` booleans: keys not after the query."""
        token = repeat_each(ops.arange(self.size), self.groups)
        keys = ops.arange(self.size * len(self.nearby)) + self.size * self.nearby[0]
        return ops.expand_dims(token, 1) >= ops.expand_dims(keys, 0)

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
        none = Sums(
            ops.zeros_like(own.maximum[:, :, 0]) + LOWEST,
            *(ops.zeros_like(x[:, :, 0]) for x in own[1:]),
        )
        left, right = (_moved(own, none, self.nearby[i]) for i in (0, -1))
        start = none if earlier is None else cast_sums(earlier, none)
        before, _ = prefix_sums(left, start)
        after, _ = prefix_sums(_reversed(right), none)
        return merge_sums(before, _reversed(after))


def all_windows(
    query_features, key_features, value, query, key, mask, earlier=None,
    *, functions, kernel, window, sliding,
):  # fmt: skip
    """Computes `local_attention` without causality; the first token begins a window.

    The arguments are those of `local_attention`, with features taken apart by
    `layout.take_apart` and the fields of `Local` passed separately.

    Args:
        query_features: Query features of shape `(B, T, N, M)`, or their arrays.
        key_features: Key features of shape `(B, T, K, M)`, or their arrays.
        value: Array of shape `(B, T, K, V)`.
        query: Scaled queries of shape `(B, T, N, H)`.
        key: Scaled keys of shape `(B, T, K, H)`.
        mask: Optional booleans of shape `(B, T)`, true for visible keys.
        earlier: Optional `Sums` of keys outside all windows, which all queries see.
        functions: Functions that compute the query and key features from their arrays;
            `None` if the features are computed.
        kernel: The kernel that the features estimate.
        window: Number of tokens in a window.
        sliding: Whether the windows next to a query's own are exact too.

    Returns:
        Array of shape `(B, T, N, V)`.
    """
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups, dtype = ops.shape(value)[1], num_heads // num_kv_heads, value.dtype
    pairs = zip((query_features, key_features), functions, strict=True)
    features = [x if f is None else Deferred(f, *x) for x, f in pairs]
    features = [heads_first(x, num_kv_heads) for x in features]
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


def causal_windows(
    query_features, key_features, value, query, key, mask, far_mask=None, earlier=None,
    *, functions, kernel, window, sliding,
):  # fmt: skip
    """Computes causal `local_attention`; the first token begins a window.

    Args:
        query_features: Query features of shape `(B, T, N, M)`, or their arrays.
        key_features: Key features of shape `(B, T, K, M)`, or their arrays.
        value: Array of shape `(B, T, K, V)`.
        query: Scaled queries of shape `(B, T, N, H)`.
        key: Scaled keys of shape `(B, T, K, H)`.
        mask: Optional booleans of shape `(B, T)`, true for visible keys.
        far_mask: Booleans of shape `(B, T)`, true for keys that may be summed; `mask`
            if `None`.
        earlier: Optional `Sums` of keys outside all windows, which all queries see.
        functions: Functions that compute the query and key features from their arrays;
            `None` if the features are computed.
        kernel: The kernel that the features estimate.
        window: Number of tokens in a window.
        sliding: Whether the windows next to a query's own are exact too.

    Returns:
        The output of shape `(B, T, N, V)`, and the `Sums` of all keys that a window
        after the last one would not weigh exactly.
    """
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups, dtype = ops.shape(value)[1], num_heads // num_kv_heads, value.dtype
    windows = Windows(kernel, window, groups, sliding, True)
    far_query, compute_query = in_blocks(
        query_features, functions[0], num_kv_heads, window, groups
    )
    far_key, compute_key = in_blocks(key_features, functions[1], num_kv_heads, window)
    hidden = block_mask(mask, length, window)
    tokens = [split_heads(x, num_kv_heads) for x in (query, key, representable(value))]
    query, key, value, exists = windows.cut(*tokens, hidden)
    summed = exists if far_mask is None else block_mask(far_mask, length, window)
    summed = summed if far_mask is None else ops.expand_dims(summed, -1)
    rows = far_query, query, *map(windows.beside, (key, value, exists))

    def beyond(offset):
        """Returns what is summed before window i: keys of window `i + offset`."""
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

    start = no_sums(compute_key(one_block(far_key)), value)
    start = start if earlier is None else cast_sums(earlier, start)
    blocks = beyond(windows.nearby[0]), rows
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
