"""Fits: plain functions from random vectors and samples to the weights of a map.

A fit takes `vectors`, Gaussian draws w of shape `(K, H, m)`, and `samples`, a list of
pairs `(queries, keys)`, one for each sequence: scaled NumPy arrays of shape
`(K, n, H)`. `None` stands for no samples. It returns the weights of an `Exponential`
map by name, as NumPy arrays: `vectors` `(K, H, m)`, to which the map adds the axis of
sides; `a` `(K, 1)` or `(K, H)`; `bias` `(K, m)`; and, if the fit conditions queries and
keys, `centers` `(K, 2, H)` and `matrices` `(K, 2, H, H)`, of queries, then of keys.

OPRF, optimal positive random features, have one parameter A per head or direction,
which changes the variance of the estimate but not its mean.

References: "Performer" is Choromanski et al. (2021), "CRT" is Likhosherstov et al.,
"Chefs' Random Tables" (2022), and "DERF" is Likhosherstov et al., "FAVOR#" (2023).
"""

import numpy as np
from keras import ops

from keras_rfattn.backend import accumulated_matmul, clip, where


def favorplus(vectors, samples=None):
    """FAVOR+ (Performer, lemma 1): A = 0, whatever the samples."""
    bias = np.zeros_like(vectors[:, 0])
    return {"vectors": vectors, "a": bias[:, :1], "bias": bias}


def favorpp(vectors, samples=None):
    """FAVOR++ (CRT, equations 7 and 8): the best A of each head, 0 without samples."""
    if samples is None:
        return favorplus(vectors)
    a = best_a_of_head(mean_of(mean_square, samples))
    return favorplus(vectors) | {"a": ops.convert_to_numpy(a)}


def dense(vectors, samples=None):
    """FAVOR++ with an A of each direction, on conditioned queries and keys.

    Softmax attention does not depend on the centers and matrices, but the variance of
    its estimate grows with `exp(‖z_q + z_k‖²)`, where z_q and z_k are the conditioned
    query and key. Both are centered; then a matrix M for queries and M⁻ᵀ for keys give
    them equal covariances, up to a small ridge; finally, both are rotated onto the
    eigenvectors of `E (z_q + z_k)(z_q + z_k)ᵀ`. Each entry of A is the optimum of CRT,
    equation 7, with d = 1. DERF has such matrices too, without centers.
    """
    heads, dim = vectors.shape[:2]
    if samples is None:
        identity = np.broadcast_to(np.eye(dim), (heads, 2, dim, dim))
        weights = {"centers": np.zeros((heads, 2, dim)), "matrices": identity}
        return favorplus(vectors) | {"a": np.zeros((heads, dim))} | weights
    centers = mean_of(lambda q, k: np.stack([q.mean(1), k.mean(1)]), samples)
    c_q, c_k = centers[:, :, None]
    centered = [(q - c_q, k - c_k) for q, k in samples]
    matrix = balance(*second_moments(centered))
    matrix = _eigenvectors(_through(matrix, centered)).swapaxes(-1, -2) @ matrix
    z = mean_of(mean_square, _through(matrix, centered))
    key_matrix = np.linalg.inv(matrix).swapaxes(-1, -2)
    return favorplus(vectors) | {
        "a": ops.convert_to_numpy(best_a_of_directions(z)),
        "centers": centers.swapaxes(0, 1),
        "matrices": np.stack([matrix, key_matrix], axis=1),
    }


def best_a(z, dim):
    """Returns the A of least variance for a mean square z (CRT, equation 7).

    It is the paper's formula without its division by z:
    `A = (1 - 1/ρ) / 8` with `ρ = 2d / (√((2z + d)² + 8dz) + 2z + d)`.
    """
    # Far below where its square would overflow.
    z = clip(z, high=1e15)
    root = ops.sqrt(ops.square(2 * z + dim) + 8 * dim * z)
    rho = 2 * dim / (root + 2 * z + dim)
    return (1 - 1 / rho) / 8


def best_a_of_head(z):
    """Returns the A `(..., 1)` of heads with mean squares z `(..., H)`."""
    return best_a(ops.sum(z, axis=-1, keepdims=True), z.shape[-1])


def best_a_of_directions(z):
    """Returns the A `(..., H)` of directions with mean squares z `(..., H)`."""
    return best_a(z, 1)


def constant(vectors, a):
    """Returns `wᵀA w + ¼ log det(1 - 4A)` of w `(..., H, m)`, A `(..., 1 or H, 1)`."""
    logs, squares = ops.log(1 - 4 * a) / 4, vectors * vectors
    if a.shape[-2] == 1:
        logs = logs * vectors.shape[-2]
        squares = ops.sum(squares, axis=-2, keepdims=True)
    products = accumulated_matmul(a, squares, transpose_a=True, is_precise=True)
    return products + ops.sum(logs, axis=-2, keepdims=True)


# --- Moments of queries and keys


def mean_of(function, samples):
    """Averages `function(queries, keys)` over samples, with equal weights."""
    return np.mean([function(q, k) for q, k in samples], axis=0)


def mean_square(q, k):
    """Returns the mean of `(q_l + k_l)²` over all pairs of tokens, `(K, H)`."""
    squares = np.mean(q * q, axis=1) + np.mean(k * k, axis=1)
    return squares + 2 * np.mean(q, axis=1) * np.mean(k, axis=1)


def mean_square_of_rows(query, key, query_mask=None, key_mask=None):
    """Returns `mean_square` of tokens `(B, T, N, H)` and `(B, S, K, H)`: `(B, K, H)`.

    Gradients stop here: A does not change the mean of the estimate, so its gradient
    would only be noise.
    """
    q_square, q_mean = _masked_moments(query, query_mask)
    k_square, k_mean = _masked_moments(key, key_mask)
    heads, groups = key.shape[2], query.shape[2] // key.shape[2]
    if groups > 1:
        shape = (-1, heads, groups, query.shape[-1])
        q_square, q_mean = (
            ops.mean(ops.reshape(x, shape), axis=2) for x in (q_square, q_mean)
        )
    return ops.stop_gradient(q_square + k_square + 2 * q_mean * k_mean)


def _masked_moments(x, mask):
    """Returns the means of `x²` and of `x` over real tokens, each `(B, N, H)`."""
    x = ops.cast(x, "float32")
    if mask is None:
        return ops.mean(ops.square(x), axis=1), ops.mean(x, axis=1)
    mask = ops.cast(mask, "bool")
    x = where(ops.expand_dims(mask, (2, 3)), x, 0)
    count = ops.expand_dims(ops.sum(ops.cast(mask, "float32"), axis=1), (1, 2))
    count = clip(count, low=1)
    return ops.sum(ops.square(x), axis=1) / count, ops.sum(x, axis=1) / count


def second_moments(samples):
    """Returns `E q qᵀ` and `E k kᵀ` over tokens, as an array `(2, K, H, H)`."""

    def moment(x):
        return np.einsum("knh,kni->khi", x, x) / x.shape[1]

    return mean_of(lambda q, k: np.stack([moment(q), moment(k)]), samples)


def balance(query_covariance, key_covariance, ridge=1e-3):
    """Returns the symmetric M for which `M C_q M = M⁻¹ C_k M⁻¹`, for each head."""

    def regular(c):
        size = np.trace(c, axis1=-2, axis2=-1)[:, None, None] / c.shape[-1]
        return c + (ridge * size + 1e-12) * np.eye(c.shape[-1])

    c_q, c_k = regular(query_covariance), regular(key_covariance)
    root = power(c_q, 0.5)
    inverse = power(c_q, -0.5)
    # M² is the geometric mean C_q⁻¹ # C_k = C_q^-½ (C_q^½ C_k C_q^½)^½ C_q^-½.
    return power(inverse @ power(root @ c_k @ root, 0.5) @ inverse, 0.5)


def power(matrices, exponent):
    """Returns a real power of symmetric positive matrices `(..., d, d)`."""
    values, vectors = np.linalg.eigh((matrices + matrices.swapaxes(-1, -2)) / 2)
    values = np.maximum(values, 1e-30) ** exponent
    return (vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2)


def _eigenvectors(samples):
    """Returns the eigenvectors of `E (x + y)(x + y)ᵀ` over pairs, as columns."""

    def cross(q, k):
        product = np.einsum("kh,ki->khi", q.mean(1), k.mean(1))
        return product + product.swapaxes(-1, -2)

    return np.linalg.eigh(second_moments(samples).sum(0) + mean_of(cross, samples))[1]


def _through(matrix, samples):
    """Transforms samples to `M q` for queries and `M⁻ᵀ k` for keys."""
    inverse = np.linalg.inv(matrix)
    return [(q @ matrix.swapaxes(-1, -2), k @ inverse) for q, k in samples]
