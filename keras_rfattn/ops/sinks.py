"""Exact attention to the first tokens of a row, by additional features.

Pretrained decoders put much of their attention on the first tokens, which are called
attention sinks. Features estimate these large weights badly.

Sink s gets a feature of its own. A query has the kernel `k(q, k_s)` as its value, and a
key has 1 if it is the key of the sink and 0 otherwise. All other features of the sink's
key are 0. The product of features is then exactly the kernel for sinks, and the map's
estimate for other keys. Algorithms and states therefore treat sinks like any feature,
and causality and masks apply to them like to any token.

Sinks are the positions 0 to `n - 1`, counted from a row's first visible token.

Reference:
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), who
    keep the first tokens beside a sliding window.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, take_tokens, where
from keras_rfattn.ops.deferred import Deferred
from keras_rfattn.ops.features import LOWEST, Features
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.masks import first_visible


class Sinks(NamedTuple):
    """The first tokens of each row, which queries weigh exactly.

    Attributes:
        key: Scaled keys of shape `(B, n, K, H)`. Those of sinks that do not exist may
            hold any finite numbers.
        kernel: `Softmax()` or `Polynomial(degree)`: the kernel that features estimate.
    """

    key: Any
    kernel: Any

    @property
    def count(self):
        """The number of sinks n."""
        return self.key.shape[1]

    def of_queries(self, features, query):
        """Returns query features `(B, T, N, M + n)`."""
        num_heads, num_kv_heads = query.shape[2], self.key.shape[2]
        rows, length = split_heads(query, num_kv_heads), ops.shape(query)[1]
        key = ops.cast(split_heads(self.key, num_kv_heads), rows.dtype)
        weights = self.kernel.log_weights(rows, key)
        weights = merge_heads(weights, num_heads, length)
        return _append(QueryFunction, features, weights)

    def of_keys(self, features, position):
        """Returns key features `(B, S, K, M + n)`."""
        x = features.x if isinstance(features, Deferred) else features.log_scale
        number = ops.arange(self.count, dtype="int32")
        is_sink = ops.expand_dims(position, (2, 3)) == number
        shape = (*ops.shape(x)[:-1], self.count)
        flags = ops.broadcast_to(ops.cast(is_sink, x.dtype), shape)
        return _append(KeyFunction, features, flags)


def first_tokens(key, count, key_mask=None):
    """Returns the keys of the sinks, and the positions of all keys."""
    batch, length = ops.shape(key)[:2]
    first = 0 if key_mask is None else first_visible(key_mask)
    position = ops.expand_dims(ops.arange(length, dtype="int32"), 0) - first
    source = ops.expand_dims(ops.arange(count, dtype="int32"), 0) + first
    # A row with fewer tokens has fewer sinks.
    source = ops.broadcast_to(clip(source, 0, length - 1), (batch, count))
    return take_tokens(key, source), position


def _append(cls, features, columns):
    """Appends arrays `(..., n)`, from which `cls` computes n features."""
    if not isinstance(features, Deferred):
        return cls.joined(features, columns)
    function = cls(features.function, columns.shape[-1])
    x = ops.concatenate([features.x, ops.cast(columns, features.x.dtype)], axis=-1)
    return Deferred(function, x, features.parameters)


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function for `Deferred` whose input ends in `count` appended columns."""

    function: Any
    count: int

    # `heads_first` returns computed features.
    has_exponents: ClassVar = False

    def __call__(self, x, parameters):
        features = self.function(x[..., : -self.count], parameters)
        return self.joined(features, x[..., -self.count :])

    def heads_first(self, x, parameters):
        """Computes features of rows in heads-first layout; see `Deferred`."""
        features = self.function.heads_first(x[..., : -self.count], parameters)
        return self.joined(features.compute(), x[..., -self.count :])


@dataclasses.dataclass(frozen=True)
class QueryFunction(_Function):
    """Appends the logarithms of weights to the exponents of query features."""

    @staticmethod
    def joined(features, weights):
        """Returns the features of queries with those of sinks."""
        dense, values = features.dense(), None
        if dense.values is not None:
            ones = ops.ones_like(ops.cast(weights, dense.values.dtype))
            values = ops.concatenate([dense.values, ones], axis=-1)
        return _features(features, values, dense.spread_scale(), weights)


@dataclasses.dataclass(frozen=True)
class KeyFunction(_Function):
    """Appends features that are 1 for the key of a sink, and 0 for other keys."""

    @staticmethod
    def joined(features, flags):
        """Returns the features of keys with those of sinks."""
        dense, values, is_sink = features.dense(), None, flags > 0
        is_any = ops.any(is_sink, axis=-1, keepdims=True)
        if dense.values is not None:
            values = where(is_any, ops.zeros_like(dense.values), dense.values)
            flags = ops.cast(flags, values.dtype)
            values = ops.concatenate([values, flags], axis=-1)
        scale = dense.spread_scale()
        lowest = ops.zeros_like(scale[..., :1]) + LOWEST
        own = where(is_sink, ops.zeros_like(lowest), lowest)
        return _features(features, values, where(is_any, lowest, scale), own)


class OffsetFeatures(Features):
    """Features of a kernel whose attention has a 1 in its denominator."""

    has_offset = True
    is_signed = False


def _features(features, values, scale, columns):
    scale = ops.concatenate([scale, ops.cast(columns, scale.dtype)], axis=-1)
    return (OffsetFeatures if features.has_offset else Features)(values, scale)
