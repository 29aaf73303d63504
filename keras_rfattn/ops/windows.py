"""Attention in windows whose first window begins at the first token of the sequence.

Attention is exact inside a window, and uses sums of features for the other windows.
`local_attention`, chunks of new tokens after a state, and the stretches of several
devices are built from it.
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from keras_rfattn.backend.loops import by_heads, fold
from keras_rfattn.backend.precision import (
    known_finite,
    quotient,
    repeat_each,
    representable,
    where,
)
from keras_rfattn.backend.sizes import leading, product
from keras_rfattn.fused import torch_cpu as fused
from keras_rfattn.ops.features import LOWEST, Deferred, Exponents, Marked, map_features
from keras_rfattn.ops.kernel_attention import (
    Softmax,
    finite_tokens,
    read_exactly,
    spoiled,
)
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
from keras_rfattn.ops.not_finite import LARGEST
from keras_rfattn.ops.prefix_sums import prefix_sums
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    combine,
    guarded,
    merge_sums,
    no_sums,
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

    def is_fused(self, query_features, key_features, query, key, value, earlier):
        """Returns whether `fused` can compute this, from `Marked` features."""
        if self.kernel != Softmax() or earlier is not None:
            return False
        return fused.is_fused(query_features, key_features, value, query, key)

    def beside(self, blocks):
        """Returns each window together with the windows nearby, side by side."""
        found = [shifted(blocks, x) for x in self.nearby]
        return found[0] if len(found) == 1 else ops.concatenate(found, axis=3)

    def answer(self, sums, features, query, key, value, mask, is_all, is_last, dtype):
        """Returns the output, from sums for far windows and exactly for those nearby.

        Args:
            sums: `Sums` of what is far from each window, or `Averages`.
            features: `Features` of the queries of shape `(B, K, n, C · G, M)`, or
                `Exponents` if `fused` reads them.
            query: Queries of shape `(B, K, n, C · G, H)`.
            key: Keys nearby, as returned by `beside`.
            value: Values nearby, as returned by `beside`.
            mask: Booleans nearby, as returned by `beside`.
            is_all: Whether no key is hidden.
            is_last: Whether the features may be overwritten because nothing else uses
                them.
            dtype: Dtype of the result.
        """
        within = self._within() if self.is_causal else None
        # Windows next to a query's own may be zeros before the start or after the end.
        is_all &= within is None and len(self.nearby) == 1
        visible = None if is_all else ops.swapaxes(mask, -1, -2)
        if within is not None:
            # LiteRT has no logical `and` for arrays with five axes.
            visible = where(within, visible, False)
        given, mask = (query, key, value), mask[..., 0]
        is_finite = known_finite(*given, limit=LARGEST)
        tokens = given if is_finite else finite_tokens(*given)
        beside = ops.expand_dims(sums.spoiled, (-2, -1))
        if not is_finite:
            beside = beside + spoiled(*given, mask, self.groups, self.is_causal)
        if isinstance(features, Exponents):
            output = fused.read_beside(sums, features, *tokens, visible)
            return ops.cast(output + beside, dtype)
        far = read(sums, features, value.dtype, is_last=is_last)
        near = read_exactly(self.kernel, *tokens, visible)
        reading = combine(far, near)
        return quotient(reading.numerator, guarded(reading, features), beside, dtype)

    def _within(self):
        """Returns `(C · G, C · len(nearby))` booleans: keys not after the query."""
        token = repeat_each(ops.arange(self.size), self.groups)
        keys = ops.arange(self.size * len(self.nearby)) + self.size * self.nearby[0]
        return ops.expand_dims(token, 1) >= ops.expand_dims(keys, 0)

    def __call__(self, query_features, key_features, query, key, value, mask, earlier):
        """Computes all windows of some heads, without causality: `(B, K, T · G, V)`."""
        sides = query_features, key_features
        is_fused = self.is_fused(*sides, query, key, value, earlier)
        are_own = [isinstance(x.features, Exponents) for x in sides]

        def cut(marked, groups=1):
            if not is_fused:
                marked = Marked(marked.features.compute(), marked.spoiled)
            return map_features(lambda x: cut_blocks(x, self.size, groups), marked)

        query, key, value, exists = self.cut(query, key, value, mask)
        tokens = admit(cut(key_features), value, mask)
        if is_fused:
            far = fused.summarize(*tokens)
            if far.logs.shape[2] <= fused.WINDOWS:
                far = far.elsewhere(self.nearby)
            else:
                far = fused.Averages.of(self._elsewhere(far.sums()))
        else:
            far = summarize(*tokens, mask, are_own[1])
            far = self._elsewhere(far, earlier)
        del tokens
        features, _ = cut(query_features, self.groups)
        near = (self.beside(x) for x in (key, value, exists))
        is_all, dtype = mask is None, value.dtype
        output = self.answer(far, features, query, *near, is_all, are_own[0], dtype)
        shape = ops.shape(output)
        return ops.reshape(output, (*shape[:2], -1, shape[-1]))

    def _elsewhere(self, own, earlier=None):
        """Returns each window's `Sums` over `earlier` and all windows not `nearby`."""
        none = Sums(
            ops.zeros_like(own.maximum[:, :, 0]) + LOWEST,
            *(ops.zeros_like(x[:, :, 0]) for x in own[1:]),
        )
        left, right = (_moved(own, none, self.nearby[i]) for i in (0, -1))
        start = none if earlier is None else _cast(earlier, none)
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
    features = [
        heads_first(
            x if function is None else Deferred(function, *x), num_kv_heads,
            is_lazy=True,
        )
        for x, function in zip((query_features, key_features), functions, strict=True)
    ]  # fmt: skip
    windows = Windows(kernel, window, groups, sliding, False)
    size = product(value.shape[0], length, groups, features[1].features.width)
    query, key, value = (
        split_heads(x, num_kv_heads) for x in (query, key, representable(value))
    )
    if windows.is_fused(*features, query, key, value, earlier):
        size = None
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
    are_own = [x is not None and x.is_exponential for x in functions]
    hidden = block_mask(mask, length, window)
    tokens = [split_heads(x, num_kv_heads) for x in (query, key, representable(value))]
    query, key, value, exists = windows.cut(*tokens, hidden)
    summed = exists if far_mask is None else block_mask(far_mask, length, window)
    summed = summed if far_mask is None else ops.expand_dims(summed, -1)
    rows = far_query, query, *map(windows.beside, (key, value, exists))

    def beyond(offset):
        """Returns what is summed before window i: keys of window `i + offset`."""
        keys = map_features(lambda x: shifted(x, offset), far_key)
        is_all = hidden is None and far_mask is None and not offset
        return keys, shifted(value, offset), None if is_all else shifted(summed, offset)

    def forward(sums, far, rows):
        keys, value, mask = far
        mask = None if mask is None else needed(mask[..., 0])
        own = summarize(*admit(compute_key(keys), value, mask), mask, are_own[1])
        before, last = prefix_sums(own, Sums(*sums))
        features, *rows = rows
        features, _ = compute_query(features)
        is_all = hidden is None
        found = windows.answer(before, features, *rows, is_all, are_own[0], dtype)
        return tuple(last), block_tokens(found, num_heads)

    start = no_sums(compute_key(one_block(far_key)).features, value)
    start = start if earlier is None else _cast(earlier, start)
    blocks = beyond(windows.nearby[0]), rows
    last, found = fold(forward, tuple(start), blocks)
    return join_tokens(found, length), Sums(*last)


def shifted(blocks, offset):
    """Returns blocks in which block i is the former block `i + offset`, or zeros."""
    if offset == 0:
        return blocks
    shape = ops.shape(blocks)
    if keras.backend.backend() == "tensorflow":
        # LiteRT slices arrays of at most five axes.
        blocks = ops.reshape(blocks, (*shape[:3], math.prod(shape[3:])))
    zeros = ops.zeros_like(blocks[:, :, : abs(offset)])
    if offset < 0:
        found = ops.concatenate([zeros, blocks[:, :, :offset]], axis=2)
    else:
        found = ops.concatenate([blocks[:, :, offset:], zeros], axis=2)
    return ops.reshape(found, shape)


def _moved(sums, none, offset):
    """Returns `Sums` in which window i has the sums of window `i + offset`, if any."""

    def move(x, y):
        y = ops.expand_dims(ops.cast(y, x.dtype), 2)
        parts = [y, x[:, :, :-1]] if offset < 0 else [x[:, :, 1:], y]
        return ops.concatenate(parts, axis=2)

    return Sums(*map(move, sums, none)) if offset else sums


def _cast(sums, like):
    return Sums(*(ops.cast(x, y.dtype) for x, y in zip(sums, like, strict=True)))


def _reversed(sums):
    return Sums(*(ops.flip(x, axis=2) for x in sums))
