"""Sizes and values of the features of angular hybrids; not a recipe itself."""

from keras import ops

from keras_rfattn.papers import hybrid_variance


def cost(m, n, dim, counts_products=True):
    """Returns the multiplications for the hybrid's features of one token.

    Both estimators share `m` vectors, and the coefficient has `n`. `counts_products`
    tells whether the `4 m (n + 1)` products count.
    """
    return (m + n) * dim + (4 * m * (n + 1) if counts_products else 0)


def equal_cost(num_vectors, dim, counts_products=True):
    """Returns the (m, n) with the smallest bound that cost at most `num_vectors`."""
    pairs = []
    for n in range(1, num_vectors):
        fixed = cost(0, n, dim, counts_products)
        m = (num_vectors * dim - fixed) // (cost(1, n, dim, counts_products) - fixed)
        pairs += [(m, n)] if m else []
    return min(
        pairs, key=lambda mn: hybrid_variance.angular_relative_error_bound(1.0, *mn)
    )


def dense(features):
    """Returns the values of features as one array, without a separate scale."""
    features = features.dense()
    return features.ones_or_values() * ops.exp(features.log_scale)
