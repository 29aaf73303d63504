"""The door: a token that is not finite must reach exactly the rows that see it.

Which rows see a token follows from the mask alone, and not from the algorithm. So
tokens are checked once, before any algorithm runs. Those that are not finite are
replaced by zeros, and the rows that see one become NaN afterwards, head by head.
Algorithms therefore meet finite numbers only. A state remembers such a token by a
numerator of NaN.

Finite numbers of any size are legal: `LARGEST` bounds them.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, finite_tokens, known_finite, where

# Entries of queries and keys beyond this are replaced by it: then their squares, summed
# over a head, stay far above `features.LOWEST`.
LARGEST = 1e13


class Finite(NamedTuple):
    """Which tokens are finite; a key with a value that is not is not finite either."""

    query: Any  # (B, T, N, 1)
    key: Any  # (B, S, K, 1)


def judge(query, key, value):
    """Returns finite queries, keys and values, and `Finite` (`None` if all were)."""
    query, key, value = map(ops.convert_to_tensor, (query, key, value))
    infinity = float("inf")
    if known_finite(query, key, limit=LARGEST) and known_finite(value, limit=infinity):
        return query, key, value, None
    finite = Finite(
        finite_tokens(query), ops.logical_and(finite_tokens(key), finite_tokens(value))
    )
    query = where(finite.query, clip(query, -LARGEST, LARGEST), 0)
    key = where(finite.key, clip(key, -LARGEST, LARGEST), 0)
    value = where(finite.key, value, 0)
    return query, key, value, finite


def marked(output, finite, mask):
    """Turns the rows of an output `(B, T, N, V)` into NaN that see a bad token."""
    if finite is None:
        return output
    spoiled = _hidden_to_false(ops.logical_not(finite.key), mask.key_mask)
    if mask.causal:
        # A running maximum: XLA computes a cumulative sum in S² steps.
        position = ops.arange(ops.shape(spoiled)[1], dtype="int32")
        position = ops.reshape(position, (1, -1, 1, 1))
        first = where(spoiled, position, position[:, -1:] + 1)
        seen = position >= ops.amin(first, axis=1, keepdims=True)
        if mask.prefix_mask is not None:
            prefix = _hidden_to_false(spoiled, mask.prefix_mask)
            seen = ops.logical_or(seen, ops.any(prefix, axis=1, keepdims=True))
    else:
        seen = ops.any(spoiled, axis=1, keepdims=True)
    seen = ops.repeat(seen, output.shape[2] // finite.key.shape[2], axis=2)
    seen = ops.logical_or(seen, ops.logical_not(finite.query))
    # A sum, so that a loss which is NaN has a gradient that is NaN.
    return output + ops.cast(where(seen, float("nan"), 0.0), output.dtype)


def remembered(state, finite, key_mask):
    """Returns a state whose readers become NaN if it has taken in a bad token."""
    if finite is None:
        return state
    spoiled = _hidden_to_false(ops.logical_not(finite.key), key_mask)
    spoiled = where(ops.any(spoiled, axis=1), float("nan"), 0.0)  # (B, K, 1)
    spoiled = ops.expand_dims(ops.cast(spoiled, state.far.numerator.dtype), -1)
    far = state.far._replace(numerator=state.far.numerator + spoiled)
    return state._replace(far=far)


def _hidden_to_false(tokens, mask):
    """Sets hidden tokens of booleans `(B, S, K, 1)` to false."""
    if mask is None:
        return tokens
    mask = ops.expand_dims(ops.cast(mask, "bool"), (2, 3))
    return ops.logical_and(tokens, mask)
