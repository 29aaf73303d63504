"""Heads that stay softmax in a layer whose other heads are linear.

A few heads retrieve a single token from elsewhere in the text, which random features of
any useful width blur. Most heads do not. "DuoAttention" (Xiao et al., 2024) keeps full
attention in such "retrieval heads". `select_heads` finds them. They are
key/value heads, because keys and values are what a cache holds for them.
"""

import dataclasses
import functools
import itertools

from keras import ops


def with_softmax_heads(call, output):
    """Replaces the output of heads that stay softmax by softmax attention."""
    heads, count = call.options.softmax_heads, call.key.shape[2]
    if not heads:
        return output
    check_softmax_heads(heads, count, "the keys")
    groups = call.query.shape[2] // count
    others = taken(output, linear_heads(call), groups)
    return joined(call, others, of_heads(call, heads).softmax())


def linear_heads(call):
    """Returns the key/value heads that do not stay softmax."""
    kept = call.options.softmax_heads
    return [i for i in range(call.key.shape[2]) if i not in kept]


def of_heads(call, heads):
    """Returns an `Attention` of some key/value heads and the queries that read them."""
    count = call.key.shape[2]
    groups, sinks = call.query.shape[2] // count, call.sink_logits
    if sinks is not None:
        sinks = taken(ops.reshape(sinks, (1, 1, -1)), heads, groups)
    return call.replace(
        query=taken(call.query, heads, groups),
        key=taken(call.key, heads),
        value=taken(call.value, heads),
        feature_map=MapOfHeads(call.feature_map, heads, count),
        options=dataclasses.replace(call.options, softmax_heads=()),
        sink_logits=sinks,
    )


def joined(call, others, kept):
    """Returns `(B, T, N, V)` from the outputs of linear heads and of softmax heads."""
    heads, count = call.options.softmax_heads, call.key.shape[2]
    groups, pieces, done = call.query.shape[2] // count, [], {False: 0, True: 0}
    for is_kept, run in itertools.groupby(range(count), lambda i: i in heads):
        start, size = done[is_kept], groups * len(list(run))
        done[is_kept] = start + size
        pieces.append((kept if is_kept else others)[:, :, start : start + size])
    return ops.concatenate(pieces, axis=2)


def taken(x, heads, groups=1):
    """Returns some key/value heads of `(B, T, K · groups, ...)`."""
    # Slices are used because an array of indices would have to be copied to the GPU.
    starts = [head * groups for head in heads]
    return ops.concatenate([x[:, :, i : i + groups] for i in starts], axis=2)


class MapOfHeads:
    """A feature map for some of its key/value heads; everything else is the map's."""

    def __init__(self, feature_map, heads, count):
        self.feature_map, self.heads, self.count = feature_map, heads, count

    def __getattr__(self, name):
        return getattr(self.feature_map, name)

    def prepare(self, query, key):
        """Prepares tokens, as `FeatureMap.prepare` does."""
        groups = query.shape[2] // key.shape[2]
        both = self.feature_map.prepare(self._among_all(query), self._among_all(key))
        sizes = groups, 1
        return [taken(x, self.heads, y) for x, y in zip(both, sizes, strict=True)]

    def bind(self, query, key, *args, **kwargs):
        """Binds the map to a call, as `FeatureMap.bind` does."""
        tokens = self._among_all(query), self._among_all(key)
        bound = self.feature_map.bind(*tokens, *args, **kwargs)
        return MapOfHeads(bound, self.heads, self.count)

    def query_features(self, x):
        """Returns the features of queries `(B, T, N, H)`."""
        return self._features(self.feature_map.query_features, x)

    def key_features(self, x):
        """Returns the features of keys `(B, S, K, H)`."""
        return self._features(self.feature_map.key_features, x)

    def _among_all(self, x):
        """Returns tokens of all heads, zeros for those that are left out."""
        groups = x.shape[2] // len(self.heads)
        none, place = ops.zeros_like(x[:, :, :groups]), {}
        for i, head in enumerate(self.heads):
            place[head] = x[:, :, i * groups : (i + 1) * groups]
        return ops.concatenate([place.get(i, none) for i in range(self.count)], axis=2)

    def _features(self, function, x):
        groups = x.shape[2] // len(self.heads)
        features = function(self._among_all(x))
        return features.of_heads(
            functools.partial(taken, heads=self.heads, groups=groups),
            functools.partial(_rows, heads=self.heads),
        )


def _rows(weight, heads):
    """Returns some heads of a weight `(B or 1, K or 1, ...)`."""
    if weight is None or weight.shape[1] == 1:
        return weight
    return ops.concatenate([weight[:, i : i + 1] for i in heads], axis=1)


def check_softmax_heads(heads, count, whose):
    """Raises `ValueError` unless `softmax_heads` are some of the heads, but not all."""
    if heads and heads[-1] >= count:
        raise ValueError(
            f"`softmax_heads` must be indices of key/value heads of {whose}, from 0 to "
            f"{count - 1}. Received: softmax_heads={heads}."
        )
    if len(heads) == count:
        raise ValueError(
            "`softmax_heads` must leave at least one linear head. Received: all "
            f"{count} key/value heads of {whose}, softmax_heads={heads}. Keep the "
            "layer softmax (`exclude=`)."
        )
