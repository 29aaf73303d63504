"""Causal attention inside a block without any bound on the exponents.

Used by `causal` for the rows its factored product cannot represent.
"""

from keras import ops

from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.features import masked_log_scale
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.sums import Reading
from keras_rfattn.ops.sums import combine
from keras_rfattn.ops.sums import query_shift


def dyadic(query, key, value, mask, groups):
    """Causal attention inside blocks as log2(C) attentions without causality.

    A segment of length 2s is cut in halves; every query of the second sees every
    key of the first, so that each feature can be taken relative to its maximum
    over that half and no row's sum underflows. The halves are then cut in turn,
    down to a token and itself.
    """
    size = value.shape[-2]
    target = 1
    while target < size:
        target *= 2
    query = map_features(lambda x: _pad_rows(x, (target - size) * groups), query)
    key = map_features(lambda x: _pad_rows(x, target - size), key)
    value = _pad_rows(value, target - size)
    mask = _pad_rows(mask[..., None], target - size)[..., 0]

    def cut(x, parts, *inner):
        return ops.reshape(x, (*ops.shape(x)[:3], parts, *inner, x.shape[-1]))

    def attend(query, key, value, mask):
        log_scale = masked_log_scale(key, mask)
        maximum = ops.stop_gradient(ops.max(log_scale, axis=-2))
        shift = query_shift(query, maximum)
        maximum = ops.expand_dims(maximum, -2)
        query = Features(query.values, query.log_scale + maximum)
        key = Features(key.values, log_scale - maximum)
        rows = query.expand(shift[..., None], value.dtype, query.is_exponential)
        weights = weigh_keys(query, rows, key, shift)
        return weigh_values(weights, mask, value, shift)

    def flat(x, inner):
        shape = ops.shape(x)
        lead, tail = shape[:3], shape[len(shape) - inner :]
        return ops.reshape(x, (*lead, target * groups, *tail))

    half = 1
    reading = attend(
        map_features(lambda x: cut(x, target, groups), query),
        map_features(lambda x: cut(x, target, 1), key),
        cut(value, target, 1),
        cut(mask[..., None], target, 1)[..., 0],
    )
    reading = Reading(*(flat(x, 1 if i == 1 else 0) for i, x in enumerate(reading)))
    while half < target:
        parts = target // (2 * half)
        late = map_features(
            lambda x: cut(x, parts, 2, half * groups)[..., 1, :, :],  # noqa: B023
            query,
        )
        early = map_features(
            lambda x: cut(x, parts, 2, half)[..., 0, :, :],  # noqa: B023
            key,
        )
        part = attend(
            late,
            early,
            cut(value, parts, 2, half)[..., 0, :, :],
            cut(mask[..., None], parts, 2, half)[..., 0, :, 0],
        )
        nothing = Reading(
            ops.zeros_like(part.shift) + LOWEST,
            *(ops.zeros_like(x) for x in part[1:]),
        )
        both = Reading(
            *(
                flat(ops.stack([a, b], axis=4), 1 if i == 1 else 0)
                for i, (a, b) in enumerate(zip(nothing, part, strict=True))
            )
        )
        reading = combine(reading, both)
        half *= 2
    return Reading(*(x[:, :, :, : size * groups] for x in reading))


def weigh_keys(query, rows, key, shift):
    """`(weights, magnitudes)`, each `(..., R, S)`, of every query for every key.

    Args:
        query: `Features` of shape `(..., R, M)`.
        rows: The same, expanded relative to `shift`.
        key: `Features` of shape `(..., S, M)`, which nothing else holds.
        shift: Array of shape `(..., R)`.
    """
    columns = key.expand(None, rows.dtype, key.is_exponential)
    weights = accumulated_matmul(rows, columns, transpose_b=True)
    if query.is_exponential:
        return (weights,)
    rows = query.magnitudes(shift[..., None], rows.dtype)
    columns = ops.cast(ops.exp(key.log_scale), rows.dtype)
    return weights, accumulated_matmul(rows, columns, transpose_b=True)


def weigh_values(weights, mask, value, shift):
    """The reading that weights `(..., R, S)` make of values `(..., S, V)`."""
    weights = tuple(where(mask[..., None, :], w, 0) for w in weights)
    # Numerator and denominator from the same rounded weights.
    rounded = ops.cast(weights[0], value.dtype)
    numerator = accumulated_matmul(rounded, value)
    denominator = ops.sum(ops.cast(rounded, numerator.dtype), axis=-1)
    bound = ops.sum(weights[1], axis=-1) if len(weights) > 1 else denominator
    return Reading(shift, numerator, denominator, bound)


def _pad_rows(x, count):
    """Adds `count` zero (or false) rows at the end of axis -2."""
    if count == 0:
        return x
    zeros = ops.zeros((*ops.shape(x)[:-2], count, x.shape[-1]), dtype=x.dtype)
    return ops.concatenate([x, zeros], axis=-2)
