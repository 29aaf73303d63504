"""Windowed attention by its definition: a matrix with every weight."""

from keras import ops

from tests import helpers as h


def weighed(feature_map, query, key, value, near, visible):
    """Computes attention from the weight of every query and key.

    Args:
        feature_map: A built `FeatureMap`.
        query: Scaled queries `(B, T, N, H)`.
        key: Scaled keys `(B, T, K, H)`.
        value: Values `(B, T, K, V)`.
        near: NumPy booleans `(B, T, T)`, true for keys that are weighed by the kernel.
        visible: NumPy booleans `(B, T, T)`, true for keys that a query sees.
    """
    near, visible = near[:, None], visible[:, None]

    def heads(x):
        groups = h.HEADS // x.shape[2]
        return ops.transpose(ops.repeat(x, groups, axis=2), (0, 2, 1, 3))

    def dense(features):
        features = features.dense()
        scale = ops.exp(features.log_scale)
        return heads(scale if features.values is None else scale * features.values)

    far = ops.matmul(
        dense(feature_map.query_features(query)),
        ops.swapaxes(dense(feature_map.key_features(key)), -1, -2),
    )
    products = ops.matmul(heads(query), ops.swapaxes(heads(key), -1, -2))
    if feature_map.kernel == "softmax":
        exact, offset = ops.exp(products), 0
    else:
        exact, offset = products**feature_map.degree, 1
    weights = ops.where(visible, ops.where(near, exact, far), 0)
    total = ops.sum(weights, axis=-1, keepdims=True) + offset
    blind = ~visible.any(axis=-1, keepdims=True)
    output = ops.matmul(weights, heads(value)) / ops.where(blind, 1, total)
    return ops.transpose(output, (0, 2, 1, 3))
