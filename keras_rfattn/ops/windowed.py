"""Exact attention nearby, features beyond: one normaliser over both.

The sequence of each row is cut into windows of `window` tokens, counted from its
first visible key. A query weighs the keys of its own window by the kernel itself, and
those of all other windows by features. With `sliding` the window before counts as its
own too (without causality the one after also), so that a query sees at least `window`
keys exactly. A sequence that fits one window is exact attention.

Nothing is subtracted from a sum over all keys, which would cancel: what lies outside
a window is what came before and what comes after.

The local exact part of PolySketchFormer (Kacham et al., 2024, section 3.2), for
every kernel that can be computed.
"""

from typing import Any
from typing import NamedTuple

from keras import ops

from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.kernel_attention import finite_tokens
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.kernel_attention import spoiled
from keras_rfattn.ops.layout import block_mask
from keras_rfattn.ops.layout import cut_blocks
from keras_rfattn.ops.layout import in_blocks
from keras_rfattn.ops.layout import join_blocks
from keras_rfattn.ops.layout import one_block
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.layout import take_apart
from keras_rfattn.ops.layout import take_tokens
from keras_rfattn.ops.loops import compiled
from keras_rfattn.ops.loops import fold
from keras_rfattn.ops.loops import keep
from keras_rfattn.ops.masks import hide
from keras_rfattn.ops.masks import needed
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.precision import representable
from keras_rfattn.ops.sums import Reading
from keras_rfattn.ops.sums import Sums
from keras_rfattn.ops.sums import admit
from keras_rfattn.ops.sums import combine
from keras_rfattn.ops.sums import merge_sums
from keras_rfattn.ops.sums import no_sums
from keras_rfattn.ops.sums import normalize
from keras_rfattn.ops.sums import prefix_sums
from keras_rfattn.ops.sums import read
from keras_rfattn.ops.sums import summarize


class Local(NamedTuple):
    """What is exact, and on what.

    Attributes:
        query: Scaled queries, `(B, T, N, H)`.
        key: Scaled keys, `(B, S, K, H)`.
        kernel: `Softmax()` or `Polynomial(degree)`, of which the features are.
        window: Positive integer, length of a window in tokens.
        sliding: Whether the windows beside a query's own are exact too.
    """

    query: Any
    key: Any
    kernel: Any
    window: int
    sliding: bool = False


def from_first_visible(key_mask, arrays, functions):
    """Turns the rows of arrays so that the first visible key comes first.

    Args:
        key_mask: Array of shape `(B, T)`.
        arrays: What `_local` takes; `(B, T, ...)`, `Features` of such, or those and
            the parameters that one of `functions` takes.
        functions: What `take_apart` gave.

    Returns:
        The arrays turned, and a function that turns one back.
    """
    length = ops.shape(key_mask)[1]
    hidden = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) == 0
    first = ops.sum(ops.cast(hidden, "int32"), axis=1)[:, None]
    positions = ops.arange(length, dtype="int32")[None]
    forward, back = (positions + first) % length, (positions - first) % length

    def turn(x, index=forward):
        return take_tokens(x, index)

    turned = []
    for features, function in zip(arrays, functions, strict=False):
        if function is None:
            turned.append(map_features(turn, features))
        else:
            turned.append([turn(features[0]), *features[1:]])
    turned += [turn(x) for x in arrays[len(functions) :]]
    return turned, lambda x: turn(x, back)


def local_attention(
    query_features, key_features, value, local, key_mask=None, causal=False
):
    """Self-attention, exact within windows and by features beyond.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Deferred`.
        key_features: The same of shape `(B, T, K, M)`.
        value: Array of shape `(B, T, K, V)`; its dtype is the compute dtype.
        local: `Local`.
        key_mask: Optional array of shape `(B, T)`, true for visible keys. Hidden
            keys and values may hold anything, NaN included.
        causal: Whether query i sees keys `j <= i` only.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key
        is 0. Rows before the first visible key, which only a query of padding has,
        count as after the end where attention is not causal.

    Raises:
        ValueError: If the window is not a positive integer, or queries and keys are
            of different lengths.
    """
    query, key, kernel, window, sliding = local
    Options(window=window, sliding=sliding)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "A `window` needs self-attention, where queries and keys are the same "
            f"tokens. Received: window={window}, {query.shape[1]} queries and "
            f"{key.shape[1]} keys. Leave cross-attention out (`exclude=`)."
        )
    if key.shape[1] is not None and key.shape[1] <= window:
        return exact_attention(query, key, value, kernel, key_mask, causal)
    features = query_features, key_features
    arrays, functions = zip(*(take_apart(x) for x in features), strict=True)
    arrays, turn_back = [*arrays, value, query, key, key_mask], None
    if key_mask is not None:
        arrays, turn_back = from_first_visible(key_mask, arrays, functions)
    call = compiled(
        attend_windows, functions=functions, kernel=kernel, window=window,
        sliding=sliding, causal=causal,
    )  # fmt: skip
    output, _ = call(*arrays)
    if turn_back is None:
        return output
    output = turn_back(output)
    if causal:
        # Rows before the first visible key were turned behind all keys.
        begun = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) > 0
        output = ops.where(begun[:, :, None, None], output, 0)
    return output


def attend_windows(
    query_features, key_features, value, query, key, mask, far_mask=None, earlier=None,
    *, functions, kernel, window, sliding, causal,
):  # fmt: skip
    """`local_attention` of rows whose first token begins a window.

    Args:
        far_mask: `(B, T)`, which keys are ever summed; `mask` if `None`.
        earlier: `Sums` of keys that are in none of the windows, which all queries see.

    Returns:
        The output, and for causal attention the `Sums` of all that no further window
        would weigh exactly, else `None`.
    """
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    length, groups = ops.shape(value)[1], num_heads // num_kv_heads
    dtype, value = value.dtype, representable(value)
    # Windows, counted from its own, whose keys a query weighs exactly.
    nearby = range(-1 if sliding else 0, 2 if sliding and not causal else 1)

    far_query, compute_query = in_blocks(
        query_features, functions[0], num_kv_heads, window, groups
    )
    far_key, compute_key = in_blocks(key_features, functions[1], num_kv_heads, window)
    are_own = [x is not None and x.is_exponential for x in functions]
    query = cut_blocks(split_heads(query, num_kv_heads), window * groups)
    key, value = (
        cut_blocks(split_heads(x, num_kv_heads), window) for x in (key, value)
    )
    hidden = block_mask(mask, length, window)
    key, value = hide(key, hidden), hide(value, hidden)
    mask = ops.ones((1, 1, *ops.shape(value)[2:4]), dtype="bool")
    mask = (mask if hidden is None else hidden)[..., None]
    summed = mask if far_mask is None else block_mask(far_mask, length, window)
    summed = summed if far_mask is None else summed[..., None]
    near = [_beside(x, nearby) for x in (key, value, mask)]
    within = _within(window, groups, nearby) if causal else True
    rows = far_query, query, *near

    def beyond(offset):
        """What is summed before window i: keys of window `i + offset`, and on."""
        keys = far_key
        if isinstance(keys, tuple):
            keys = map_features(lambda x: _shift(x, offset), keys)
        else:
            keys = _shift(keys, offset)
        is_all = hidden is None and far_mask is None and not offset
        seen = None if is_all else _shift(summed, offset)
        return keys, _shift(value, offset), seen

    def sums_of(key, value, mask):
        mask = None if mask is None else needed(mask[..., 0])
        return summarize(*admit(compute_key(key), value, mask), mask, are_own[1])

    def look_up(sums, query, exact_query, key, value, mask):
        query, _ = compute_query(query)
        far = read(sums, query, value.dtype, is_last=are_own[0])
        # Windows beside its own may be the zeros after an end.
        is_all = hidden is None and within is True and len(nearby) == 1
        visible = None if is_all else ops.swapaxes(mask, -1, -2) & within
        tokens, mask = (exact_query, key, value), mask[..., 0]
        near = read_exactly(kernel, *finite_tokens(*tokens), visible)
        reading = Reading(*(keep(x) for x in combine(far, near)))
        beside = spoiled(*tokens, mask, groups, causal)
        beside = beside + sums.spoiled[..., None, None]
        return normalize(reading, query) + beside

    def forward(sums, far, rows):
        before, last = prefix_sums(sums_of(*far), Sums(*sums))
        return tuple(last), look_up(before, *rows)

    none = no_sums(compute_key(one_block(far_key)).features, value)
    start, last = none, None
    if earlier is not None:
        pairs = zip(earlier, none, strict=True)
        start = Sums(*(ops.cast(x, y.dtype) for x, y in pairs))
    if causal:
        last, output = fold(forward, tuple(start), (beyond(nearby[0]), rows))
    else:
        own = sums_of(*beyond(0))
        left, right = (_shifted(own, none, x) for x in (nearby[0], nearby[-1]))
        before, _ = prefix_sums(left, start)
        after, _ = prefix_sums(_reversed(right), none)
        output = look_up(merge_sums(before, _reversed(after)), *rows)
    output = ops.cast(join_blocks(output, num_heads, length), dtype)
    return output, None if last is None else Sums(*last)


def _beside(blocks, offsets):
    """Blocks `(B, K, n, C, ·)` with those `offsets` away beside them, C each."""
    return ops.concatenate([_shift(blocks, offset) for offset in offsets], axis=3)


def _shift(blocks, offset):
    """Block i is what was block `i + offset`, or zeros."""
    if offset == 0:
        return blocks
    zeros = ops.zeros_like(blocks[:, :, : abs(offset)])
    if offset < 0:
        return ops.concatenate([zeros, blocks[:, :, :offset]], axis=2)
    return ops.concatenate([blocks[:, :, offset:], zeros], axis=2)


def _shifted(sums, none, offset):
    """Those of window i are what those of window `i + offset` were, or of no key."""

    def shift(x, y):
        y = ops.cast(y, x.dtype)[:, :, None]
        parts = [y, x[:, :, :-1]] if offset < 0 else [x[:, :, 1:], y]
        return ops.concatenate(parts, axis=2)

    return Sums(*map(shift, sums, none)) if offset else sums


def _reversed(sums):
    return Sums(*(ops.flip(x, axis=2) for x in sums))


def _within(window, groups, nearby):
    """`(C · G, C · len(nearby))`: the keys nearby that are not after the query."""
    token = ops.repeat(ops.arange(window), groups)
    keys = ops.arange(window * len(nearby)) + window * nearby[0]
    return token[:, None] >= keys[None, :]
