"""Predicts the variance of a feature map for each pair, from closed forms."""

import numpy as np

from keras_rfattn.feature_maps import FeatureMap
from keras_rfattn.feature_maps.arguments import is_integer
from keras_rfattn.kernels import variance

# Number of pairs computed at once, which limits memory.
SLICE = 2**15


def predicted_variance(feature_map, head=0, stats=None):
    """Predicts the relative variance of a map's estimates, from its closed form.

    The prediction is exact for independent vectors, and for orthogonal vectors of
    generalized exponential features with one A. In all other cases it treats the
    vectors as independent.

    Args:
        feature_map: A built `FeatureMap`.
        head: Index of the key/value head.
        stats: The result of `feature_map.statistics`, for maps that do not store
            their parameters; otherwise `None`.

    Returns:
        A function `(queries, keys) -> variance / kernel²`, which takes two arrays
        `(..., H)` and returns an array `(...)`, or `None` if no closed form is known.

    Raises:
        TypeError: If `feature_map` is not a `FeatureMap`.
        ValueError: If it is not built, or has no such head.

    Examples:
        >>> from keras_rfattn import diagnostics, feature_maps
        >>> feature_map = feature_maps.FavorPlus(num_features=32, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> variance = diagnostics.predicted_variance(feature_map)
        >>> float(variance(np.ones(4), -np.ones(4)))
        0.0
    """
    moment = log_moment(feature_map, head, stats)
    if moment is None:
        return None
    covariance = feature_map.relative_covariance(head)

    def relative(query, key):
        x, y = feature_map.meets(query, key, head)
        with np.errstate(over="ignore"):
            log_variance = variance.log_variance(moment(x, y), x, y)
            total = np.exp(log_variance - 2 * np.sum(x * y, -1))
        if covariance is not None:
            total = np.maximum(total + covariance(x, y), 0)
        return total / feature_map.num_features

    def in_slices(query, key):
        shape = query.shape[:-1]
        query, key = (v.reshape(-1, v.shape[-1]) for v in (query, key))
        starts = range(0, len(query), SLICE)
        found = [relative(query[i : i + SLICE], key[i : i + SLICE]) for i in starts]
        return np.concatenate(found).reshape(shape) if found else np.zeros(shape)

    return in_slices


def log_moment(feature_map, head=0, stats=None):
    """Returns the second moment of a map's softmax estimates, from its closed form.

    Args:
        feature_map: A built `FeatureMap`.
        head: Index of the key/value head.
        stats: The result of `feature_map.statistics`, for maps that do not store
            their parameters; otherwise `None`.

    Returns:
        A function `(x, y) -> log E[Z²]`, where Z is the estimate of one random draw,
        or `None` if no closed form is known. It takes arrays `(..., H)`, which are the
        pair `feature_map.meets(query, key, head)`: queries and keys themselves, except
        for conditioned maps.

    Raises:
        TypeError: If `feature_map` is not a `FeatureMap`.
        ValueError: If it is not built, or has no such head.

    Examples:
        >>> from keras_rfattn import diagnostics, feature_maps
        >>> feature_map = feature_maps.FavorPlus(num_features=32, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> log_moment = diagnostics.log_moment(feature_map)
        >>> round(float(log_moment(np.ones(4) / 2, np.ones(4) / 2)), 4)
        6.0
    """
    _check(feature_map, head)
    return feature_map.log_moment(head, stats)


def _check(feature_map, head):
    """Raises an error unless a map is built and has this key/value head."""
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "`feature_map` must be a built `FeatureMap`. Received: "
            f"feature_map={feature_map!r:.80} of type {type(feature_map).__name__}. "
            "Use `keras_rfattn.feature_maps.get` and `build`."
        )
    if not feature_map.built:
        raise ValueError(
            "`feature_map` must be built. Received: "
            f"{type(feature_map).__name__} with built=False. Call "
            "`build((None, None, num_heads, head_dim))` first."
        )
    if not is_integer(head) or not 0 <= head < feature_map.num_heads:
        raise ValueError(
            f"`head` must be an integer from 0 to {feature_map.num_heads - 1}. "
            f"Received: head={head!r}."
        )
