"""Moments of queries and keys that maps adapt to, computed with NumPy.

A sample is a pair `(queries, keys)` of one sequence. Both are arrays of shape
`(K, n, H)`, for K key/value heads, n tokens and head dim H; see `Adaptive.adapt`.
"""

import numpy as np


def mean_of(function, samples):
    """Averages `function(queries, keys)` over samples, with equal weights."""
    return np.mean([function(q, k) for q, k in samples], axis=0)


def second_moments(samples):
    """Returns `E q qᵀ` and `E k kᵀ` over tokens, as an array `(2, K, H, H)`."""

    def moment(x):
        return np.einsum("knh,kni->khi", x, x) / x.shape[1]

    return mean_of(lambda q, k: np.stack([moment(q), moment(k)]), samples)


def balance(query_covariance, key_covariance, ridge=1e-3):
    """Returns the symmetric A for which `A C_q A = A⁻¹ C_k A⁻¹`, for each head."""

    def regular(c):
        size = np.trace(c, axis1=-2, axis2=-1)[:, None, None] / c.shape[-1]
        return c + (ridge * size + 1e-12) * np.eye(c.shape[-1])

    c_q, c_k = regular(query_covariance), regular(key_covariance)
    root = power(c_q, 0.5)
    inverse = power(c_q, -0.5)
    # C_q⁻¹ # C_k = C_q^-½ (C_q^½ C_k C_q^½)^½ C_q^-½
    return power(inverse @ power(root @ c_k @ root, 0.5) @ inverse, 0.5)


def power(matrices, exponent):
    """Returns a real power of symmetric positive matrices `(..., d, d)`."""
    values, vectors = np.linalg.eigh((matrices + matrices.swapaxes(-1, -2)) / 2)
    values = np.maximum(values, 1e-30) ** exponent
    return (vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2)
