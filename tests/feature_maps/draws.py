"""Estimates of hybrids by many independent draws.

A map built for K heads holds K independent sets of vectors: one call gives K draws.
"""

import numpy as np
from keras import ops

from tests import helpers as h

DIM, DRAWS = 4, 100_000
# In standard errors: all comparisons together exceed it once in a million runs.
LIMIT = 5.8


def pairs(count=5, radius=None):
    generator = np.random.default_rng(0)
    x, y = 0.5 * generator.normal(size=(2, count, DIM))
    if radius is not None:
        x, y = (radius * a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, y))
    return x.astype("float32"), y.astype("float32")


def dense(features):
    values, log_scale = features.dense()
    values = 1 if values is None else h.to_numpy(values).astype("float64")
    return (values * np.exp(h.to_numpy(log_scale).astype("float64")))[0]


def estimates(feature_map, x, y, draws=DRAWS):
    """`(draws, pairs)`: one estimate of each pair from each head."""
    if not feature_map.built:
        feature_map.build((None, None, draws, DIM))
    x, y = (
        ops.convert_to_tensor(np.repeat(a[None, :, None], draws, axis=2))
        for a in (x, y)
    )
    query = dense(feature_map.query_features(x))
    key = dense(feature_map.key_features(y))
    return np.sum(query * key, -1).T


def check(found, mean, variance_):
    """Mean and variance within `LIMIT` standard errors, which detect 5 and 25 %."""
    error = np.sqrt(variance_ / len(found))
    assert np.max(LIMIT * error / np.abs(mean)) < 0.05
    assert np.all(np.abs(found.mean(0) - mean) < LIMIT * error + 1e-6)
    squares = (found - mean) ** 2
    error = squares.std(0) / np.sqrt(len(found))
    assert np.max(LIMIT * error / variance_) < 0.25
    assert np.all(np.abs(squares.mean(0) - variance_) < LIMIT * error + 1e-9)
