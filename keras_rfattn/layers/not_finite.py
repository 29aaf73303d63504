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

from keras_rfattn.backend import bounded, finite_tokens, known_finite, where

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
    query = bounded(query, finite.query, LARGEST)
    key = bounded(key, finite.key, LARGEST)
    return query, key, where(finite.key, value, 0), finite


def marked(output, finite, mask=None):
    """Turns the rows of an output `(B, T, N, V)` into NaN that see a bad token."""
    # Without a mask only bad queries count: a state's readers become NaN by its sums.
    if finite is None:
        return output
    seen = ops.logical_not(finite.query)
    if mask is not None:
        groups = output.shape[2] // finite.key.shape[2]
        seen = seen | ops.repeat(_seen(finite, mask), groups, axis=2)
    # A sum, so that a loss which is NaN has a gradient that is NaN.
    return output + ops.cast(where(seen, float("nan"), 0.0), output.dtype)


def _seen(finite, mask):
    """Returns which rows see a bad key, `(B, T or 1, K, 1)`."""
    spoiled = _spoiled(finite, mask.key_mask)
    if not mask.causal:
        return ops.any(spoiled, axis=1, keepdims=True)
    # A running maximum: XLA computes a cumulative sum in S² steps.
    length = ops.shape(spoiled)[1]
    position = ops.reshape(ops.arange(length, dtype="int32"), (1, -1, 1, 1))
    first = where(spoiled, position, position[:, -1:] + 1)
    seen = position >= ops.amin(first, axis=1, keepdims=True)
    if mask.prefix_mask is None:
        return seen
    return seen | ops.any(_hidden(spoiled, mask.prefix_mask), axis=1, keepdims=True)


def remembered(state, finite, key_mask):
    """Returns a state whose readers become NaN if it has taken in a bad token."""
    if finite is None:
        return state
    spoiled = ops.any(_spoiled(finite, key_mask), axis=1)  # (B, K, 1)
    mark = ops.expand_dims(where(spoiled, float("nan"), 0.0), -1)
    numerator = state.far.numerator
    numerator = numerator + ops.cast(mark, numerator.dtype)
    return state._replace(far=state.far._replace(numerator=numerator))


def _spoiled(finite, key_mask):
    """Returns which visible keys are not finite, `(B, S, K, 1)`."""
    return _hidden(ops.logical_not(finite.key), key_mask)


def _hidden(tokens, mask):
    """Sets hidden tokens of booleans `(B, S, K, 1)` to false."""
    if mask is None:
        return tokens
    return tokens & ops.expand_dims(ops.cast(mask, "bool"), (2, 3))
