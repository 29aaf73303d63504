"""Exact attention nearby and features beyond, with one normalizer over both.

The sequence of each row is cut into windows of `window` tokens, counted from its first
visible key. A query weighs the keys of its own window by the kernel itself, and those
of all other windows by features. With `sliding` the window before its own is exact too
(without causality also the one after), so that a query sees at least `window` keys
exactly. A sequence that fits one window is exact attention.

Nothing is subtracted from a sum over all keys, because that would cancel: the sum over
the keys outside a window is computed from the keys before it and the keys after it.

This is the local exact part of PolySketchFormer (Kacham et al., 2024, section 3.2), for
every kernel that can be computed.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import compiled, fits, take_tokens, where
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.layout import take_apart
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.windows import all_windows, causal_windows


class Local(NamedTuple):
    """The tokens and the kernel for the exact part of attention.

    Attributes:
        query: Scaled queries of shape `(B, T, N, H)`.
        key: Scaled keys of shape `(B, S, K, H)`.
        kernel: `Softmax()` or `Polynomial(degree)`: the kernel that the features
            estimate.
        window: Positive integer, the number of tokens in a window.
        sliding: Whether the windows next to a query's own are exact too.

    Examples:
        >>> from keras_rfattn import ops
        >>> rng = np.random.default_rng(0)
        >>> phi = ops.Features(None, rng.standard_normal((1, 10, 2, 16), "float32"))
        >>> value = rng.standard_normal((1, 10, 2, 8), "float32")
        >>> local = ops.Local(
        ...     query=value, key=value, kernel=ops.Softmax(), window=4)
        >>> tuple(ops.local_attention(phi, phi, value, local).shape)
        (1, 10, 2, 8)
    """

    query: Any
    key: Any
    kernel: Any
    window: int
    sliding: bool = False


def from_first_visible(key_mask):
    """Returns functions that rotate rows so that the first visible key comes first.

    Args:
        key_mask: Array of shape `(B, T)`.

    Returns:
        `(turn, turn_back)`: functions of arrays `(B, T, ...)`.
    """
    length = ops.shape(key_mask)[1]
    hidden = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) == 0
    first = ops.sum(ops.cast(hidden, "int32"), axis=1, keepdims=True)
    positions = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
    forward, back = (positions + first) % length, (positions - first) % length
    return lambda x: take_tokens(x, forward), lambda x: take_tokens(x, back)


def local_attention(
    query_features, key_features, value, local, key_mask=None, causal=False
):
    """Computes self-attention that is exact within windows and uses features beyond.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Deferred` features.
        key_features: `Features` of shape `(B, T, K, M)`, or `Deferred` features.
        value: Array of shape `(B, T, K, V)`; its dtype is the compute dtype.
        local: `Local` with the scaled queries and keys, the kernel and the window.
        key_mask: Optional array of shape `(B, T)`, true for visible keys. Hidden keys
            and values may hold anything.
        causal: Whether query i sees only keys `j <= i`.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0. If attention is not causal, tokens before the first visible key, which are
        padding, count as being after the end.

    Raises:
        ValueError: If the window is not a positive integer, or if queries and keys have
            different lengths.

    Examples:
        >>> from keras_rfattn import ops
        >>> rng = np.random.default_rng(0)
        >>> phi = ops.Features(None, rng.standard_normal((1, 10, 2, 16), "float32"))
        >>> value = rng.standard_normal((1, 10, 2, 8), "float32")
        >>> local = ops.Local(
        ...     query=value, key=value, kernel=ops.Softmax(), window=4)
        >>> output = ops.local_attention(phi, phi, value, local, causal=True)
        >>> bool(np.allclose(output[:, 0], value[:, 0], atol=1e-5))
        True
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
    features, turn_back = (query_features, key_features), None
    if key_mask is not None:
        turn, turn_back = from_first_visible(key_mask)
        features = [x.of_tokens(turn) for x in features]
        value, query, key = turn(value), turn(query), turn(key)
    arrays, functions = zip(*(take_apart(x) for x in features), strict=True)
    visible = None if key_mask is None else turn(key_mask)
    attend = causal_windows if causal else all_windows
    call = compiled(
        attend, functions=functions, kernel=kernel, window=window, sliding=sliding
    )
    output = call(*arrays, value, query, key, visible)
    output = output[0] if causal else output
    if turn_back is None:
        return output
    output = turn_back(output)
    if causal:
        # Rows before the first visible key were rotated behind all keys.
        begun = ops.cumsum(ops.cast(key_mask, "int32"), axis=1) > 0
        output = where(ops.expand_dims(begun, (2, 3)), output, 0)
    return output
