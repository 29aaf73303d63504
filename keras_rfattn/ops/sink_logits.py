"""Softmax with one more logit beside those of the keys: the attention sinks of GPT-OSS.

A sink is a learned logit s per query head, whose weight is in the denominator only:
`Σ exp(q · k) v / (Σ exp(q · k) + exp(s))`. Divided by `exp(s)`, this is attention with
weights `exp(q · k - s)` and a 1 in the denominator. Polynomial attention has such a 1,
too, so every algorithm knows it (`has_offset`).
"""

from keras import ops

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


class SinkMap:
    """A feature map whose queries see a sink; everything else is the map's own."""

    def __init__(self, feature_map, sink_logits):
        self.feature_map, self.sink_logits = feature_map, sink_logits

    def __getattr__(self, name):
        return getattr(self.feature_map, name)

    def bind(self, *args, **kwargs):
        """Binds the map to a call, as `FeatureMap.bind` does."""
        return SinkMap(self.feature_map.bind(*args, **kwargs), self.sink_logits)

    def query_features(self, x):
        """Returns the features of queries `(..., N, H)`."""
        features = self.feature_map.query_features(x).dense()
        scale = features.log_scale
        sink = ops.cast(ops.reshape(self.sink_logits, (-1, 1)), scale.dtype)
        return Lowered(features.values, scale - sink)
