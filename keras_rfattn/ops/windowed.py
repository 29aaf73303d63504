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
from keras_rfattn.ops.layout import take_apart
from keras_rfattn.ops.layout import take_tokens
from keras_rfattn.ops.loops import compiled
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sizes import fits
from keras_rfattn.ops.windows import all_windows
from keras_rfattn.ops.windows import causal_windows


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
        arrays: What `causal_windows` takes; `(B, T, ...)`, `Features` of such, or those
            and the parameters that one of `functions` takes.
        functions: What `take_apart` gave.

    Returns:
        The arrays turned, and a function that turns one back.
    """
    length = ops.shape(key_mask)[1]
    hidden = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) == 0
    first = ops.sum(ops.cast(hidden, "int32"), axis=1, keepdims=True)
    positions = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
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
    if fits(key.shape[1], window):
        return exact_attention(query, key, value, kernel, key_mask, causal)
    features = query_features, key_features
    arrays, functions = zip(*(take_apart(x) for x in features), strict=True)
    arrays, turn_back = [*arrays, value, query, key, key_mask], None
    if key_mask is not None:
        arrays, turn_back = from_first_visible(key_mask, arrays, functions)
    attend = causal_windows if causal else all_windows
    call = compiled(
        attend, functions=functions, kernel=kernel, window=window, sliding=sliding
    )
    output = call(*arrays)
    output = output[0] if causal else output
    if turn_back is None:
        return output
    output = turn_back(output)
    if causal:
        # Rows before the first visible key were turned behind all keys.
        begun = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) > 0
        output = where(ops.expand_dims(begun, (2, 3)), output, 0)
    return output
