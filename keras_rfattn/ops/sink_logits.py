"""Softmax with one more logit beside those of the keys: the attention sinks of GPT-OSS.

A sink is a learned logit s per query head, whose weight is in the denominator only:
`Σ exp(q · k) v / (Σ exp(q · k) + exp(s))`. Divided by `exp(s)`, this is attention with
weights `exp(q · k - s)` and a 1 in the denominator. Polynomial attention has such a 1,
too, so every algorithm knows it (`has_offset`).
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.ops.deferred import Deferred
from keras_rfattn.ops.features import Features


def append_sinks(query, sink_logits):
    """Returns queries `(B, T, N, H + 1)` whose last coordinate is the negative sink."""
    last = ops.reshape(ops.cast(sink_logits, query.dtype), (1, 1, -1, 1))
    last = ops.broadcast_to(-last, (*ops.shape(query)[:-1], 1))
    return ops.concatenate([query, last], axis=-1)


def append_ones(key):
    """Returns keys `(B, S, K, H + 1)` whose last coordinate is 1."""
    return ops.concatenate([key, ops.ones_like(key[..., :1])], axis=-1)


class Lowered(Features):
    """Features of queries with a sink, `exp(-s)` times those without one."""

    has_offset = True


class LoweredFunction(NamedTuple):
    """A function for `Deferred`, of queries that `append_sinks` returned.

    Attributes:
        function: The function of the queries themselves; see `Deferred`.
    """

    function: Any
    has_exponents = False

    def __call__(self, x, parameters):
        return _lowered(self.function(x[..., :-1], parameters), x)

    def heads_first(self, x, parameters):
        """Returns the features of queries `(B, K, R, H + 1)`."""
        features = self.function.heads_first(x[..., :-1], parameters)
        return _lowered(features.compute(), x)


def _lowered(features, x):
    last = ops.cast(x[..., -1:], features.log_scale.dtype)
    return Lowered(features.values, features.log_scale + last)


class SinkMap:
    """A feature map whose queries see a sink; everything else is the map's own.

    Args:
        feature_map: A built `FeatureMap`.
        sink_logits: Array of shape `(N,)`, the sinks of the query heads.
    """

    # The queries of `deferred` have one coordinate more than the layer's.
    is_preparing = True

    def __init__(self, feature_map, sink_logits):
        self.feature_map, self.sink_logits = feature_map, sink_logits

    def __getattr__(self, name):
        return getattr(self.feature_map, name)

    def query_features(self, x, stats=None):
        """Returns the features of queries `(..., N, H)`."""
        features = self.feature_map.query_features(x, stats)
        sink = ops.cast(ops.reshape(self.sink_logits, (-1, 1)), x.dtype)
        return Lowered(features.values, features.log_scale - sink)

    def deferred(self, method, x, stats=None):
        """Returns `Deferred` features, as `FeatureMap.deferred` does."""
        found = self.feature_map.deferred(method, x, stats)
        if method != "query_features":
            return found
        x = append_sinks(found.x, self.sink_logits)
        return Deferred(LoweredFunction(found.function), x, found.parameters)
