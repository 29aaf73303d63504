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

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import clip, take_tokens, where
from keras_rfattn.ops.features import LOWEST, Features
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.masks import first_visible


class Sinks(NamedTuple):
    """The first tokens of each row, which queries weigh exactly."""

    key: Any  # (B, n, K, H), scaled; any finite numbers for sinks that do not exist
    kernel: Any  # `Softmax()` or `Polynomial(degree)`, which the features estimate

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
        return _with_query_columns(features, weights)

    def of_keys(self, features, position):
        """Returns key features `(B, S, K, M + n)`."""
        number = ops.arange(self.count, dtype="int32")
        is_sink = ops.expand_dims(position, (2, 3)) == number
        return _with_key_columns(features, is_sink)


def first_tokens(key, count, key_mask=None):
    """Returns the keys of the sinks, and the positions of all keys."""
    batch, length = ops.shape(key)[:2]
    first = 0 if key_mask is None else first_visible(key_mask)
    position = ops.expand_dims(ops.arange(length, dtype="int32"), 0) - first
    source = ops.expand_dims(ops.arange(count, dtype="int32"), 0) + first
    # A row with fewer tokens has fewer sinks.
    source = ops.broadcast_to(clip(source, 0, length - 1), (batch, count))
    return take_tokens(key, source), position


def _with_query_columns(features, weights):
    """Appends the logarithms of weights to the exponents of query features."""
    dense, values = features.dense(), None
    if dense.values is not None:
        ones = ops.ones_like(ops.cast(weights, dense.values.dtype))
        values = ops.concatenate([dense.values, ones], axis=-1)
    return _features(features, values, dense.spread_scale(), weights)


def _with_key_columns(features, is_sink):
    """Appends features that are 1 for the key of a sink, and 0 for other keys."""
    dense, values = features.dense(), None
    scale = dense.spread_scale()
    shape = (*ops.shape(scale)[:-1], is_sink.shape[-1])
    is_sink = ops.broadcast_to(is_sink, shape)
    is_any = ops.any(is_sink, axis=-1, keepdims=True)
    if dense.values is not None:
        values = where(is_any, ops.zeros_like(dense.values), dense.values)
        flags = ops.cast(is_sink, values.dtype)
        values = ops.concatenate([values, flags], axis=-1)
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
