"""A hybrid that adapts to clusters of queries and of keys ("hybrid_clustered")."""

import math
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_rfattn.arguments import derive_seed, is_integer
from keras_rfattn.backend import where
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.feature_maps.weights import Adaptive
from keras_rfattn.ops.features import LOWEST, Features
from keras_rfattn.ops.layout import move_axis
from keras_rfattn.papers.complex_exponential import (
    diagonal,
    diagonal_features,
    diagonal_parts,
    inverted,
)


class HybridClustered(Adaptive, ProjectedFeatureMap):
    """Complex exponential features with a diagonal A for each pair of clusters.

    A query or key belongs to the cluster with the nearest center. The coefficient of
    a pair of clusters is 1 if the query x and the key y belong to it, and 0 otherwise.
    Exactly one estimator is therefore active for each x and y, and all estimators can
    use the same vectors. Features are positive if A is real. `adapt` finds the centers
    by k-means. Until then every A is the identity, which gives `FavorPlus`.

    Args:
        num_features: Number m of random vectors w, 32 by default.
        num_clusters: Pair of the number of query clusters and the number of key
            clusters, (2, 2) by default.
        num_pairs: Number of pairs of clusters that have their own A. These are the
            pairs with the most pairs of tokens. The others share the estimator of
            `FavorPlus`. By default, all pairs have their own.
        form: The form of A.
            `"real"` (default): A is real. It follows equation 88, but with root mean
            squares of a cluster's entries in place of its center. Both are the same for
            concentrated clusters, but a center near 0 does not amplify noise.
            `"complex"`: A is complex (equations 86 and 87). The estimate is exact at
            the centers. Features are signed and have twice the width.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` or a number of clusters or pairs is not a positive
            integer, there are fewer pairs than `num_pairs`, or `form` or `projection`
            is unknown.
        ImportError: In `adapt`, if scikit-learn is missing.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), definition H.2.

    Examples:
        >>> from keras_rfattn import papers
        >>> feature_map = papers.HybridClustered(num_features=4, seed=0)
        >>> feature_map.build((None, None, 1, 4))
        >>> tokens = np.random.default_rng(0).normal(size=(1, 50, 4))
        >>> feature_map.adapt([(tokens, tokens)])
        >>> feature_map.is_calibrated, feature_map.output_dim
        (True, 16)
    """

    is_symmetric = False
    default_num_features = 32

    def __init__(
        self, num_features=None, num_clusters=(2, 2), num_pairs=None, form="real",
        **kwargs,
    ):  # fmt: skip
        super().__init__(num_features, **kwargs)
        self.num_clusters = check_clusters(num_clusters)
        every = math.prod(self.num_clusters)
        self.num_pairs = every if num_pairs is None else num_pairs
        is_count = is_integer(self.num_pairs) and 0 < self.num_pairs <= every
        if form not in ("real", "complex") or not is_count:
            raise ValueError(
                "`form` must be 'real' or 'complex', and `num_pairs` from 1 to "
                f"{every}. Received: form={form!r}, num_pairs={num_pairs!r}."
            )
        self.form = form

    @property
    def is_positive(self):
        return self.form == "real"

    @property
    def num_slots(self):
        """Number of blocks of features.

        There is one for each pair of clusters with its own A. If there are other pairs,
        there is also one for each query cluster, for their shared estimator.
        """
        every = math.prod(self.num_clusters)
        return self.num_pairs + (self.num_clusters[0] if self.num_pairs < every else 0)

    @property
    def output_dim(self):
        return self.num_slots * self.num_features * (1 if self.is_positive else 2)

    def build(self, input_shape):
        super().build(input_shape)
        (n_q, n_k), dim = self.num_clusters, self.head_dim
        nothing = Clusters(
            np.zeros((n_q, dim)), np.zeros((n_k, dim)), None, None, np.ones((n_q, n_k))
        )
        for name, value in self._arrays([nothing] * self.num_heads).items():
            setattr(self, name, self.add_fixed(name, value))

    def fit(self, samples):
        for name, value in self._arrays(find_clusters(self, samples)).items():
            getattr(self, name).assign(value)

    def _arrays(self, clusters):
        """Returns the weights for a list of `Clusters`, one for each head.

        A is the identity for `Clusters` without sizes.
        """
        heads, (n_q, n_k) = self.num_heads, self.num_clusters
        query_active = np.zeros((heads, n_q, self.num_slots))
        key_active = np.zeros((heads, n_k, self.num_slots))
        matrix = np.ones((heads, self.num_slots, self.head_dim), complex)
        for head, found in enumerate(clusters):
            order = np.argsort(-found.mass.ravel(), kind="stable")
            for rank, pair in enumerate(order):
                i, j = divmod(pair, n_k)
                has_own = rank < self.num_pairs
                slot = rank if has_own else self.num_pairs + i
                query_active[head, i, slot] = key_active[head, j, slot] = 1
                if has_own and found.query_sizes is not None:
                    matrix[head, slot] = found.diagonal(i, j, self.is_positive)
        arrays = {
            "query_centers": [c.query_centers for c in clusters],
            "key_centers": [c.key_centers for c in clusters],
            "query_active": query_active,
            "key_active": key_active,
            "matrix": np.stack([matrix.real, matrix.imag], 2),
        }
        return {name: np.float32(value) for name, value in arrays.items()}

    def query_features(self, x):
        a = self.per_head(self.matrix, x)
        return self._features(x, self.query_centers, self.query_active, a, 1)

    def key_features(self, x):
        a = inverted(self.per_head(self.matrix, x))
        return self._features(x, self.key_centers, self.key_active, a, -1)

    def _features(self, x, centers, active, a, conjugation):
        centers, active = self.per_head(centers, x), self.per_head(active, x)
        distance = ops.sum(ops.square(ops.expand_dims(x, -2) - centers), axis=-1)
        cluster = ops.one_hot(
            ops.argmin(distance, axis=-1), centers.shape[-2], dtype=x.dtype
        )
        active = ops.sum(ops.expand_dims(cluster, -1) * active, axis=-2) > 0

        # Parts have shape (..., N, slots, H). The results of all slots are then
        # concatenated along the feature axis.
        parts = diagonal_parts(ops.expand_dims(x, -2), a)
        parts = (move_axis(part, -2, 0) for part in parts)
        values, log_scale = diagonal_features(self, *parts, conjugation)
        active = ops.expand_dims(move_axis(active, -1, 0), -1)
        log_scale = where(active, log_scale, LOWEST)
        shape = (*ops.shape(x)[:-1], self.output_dim)

        def flat(part):
            return ops.reshape(move_axis(part, 0, -2), shape)

        if self.is_positive:
            return Features(None, flat(log_scale))
        return Features(flat(where(active, values, 0)), flat(log_scale))

    def get_config(self):
        return {
            **super().get_config(),
            "num_clusters": list(self.num_clusters),
            "num_pairs": self.num_pairs,
            "form": self.form,
        }


def check_clusters(num_clusters):
    """Returns two positive integers as a tuple, or raises `ValueError`."""
    is_pair = isinstance(num_clusters, (list, tuple)) and len(num_clusters) == 2
    if not is_pair or not all(is_integer(n) and n > 0 for n in num_clusters):
        raise ValueError(
            "`num_clusters` must be two positive integers, for queries and for keys. "
            f"Received: num_clusters={num_clusters!r}."
        )
    return tuple(int(n) for n in num_clusters)


class Clusters(NamedTuple):
    """Clusters of one head's queries and keys, n_q of queries and n_k of keys.

    Attributes:
        query_centers: Centers of the query clusters, `(n_q, H)`.
        key_centers: Centers of the key clusters, `(n_k, H)`.
        query_sizes: Root mean squares of the entries of each query cluster, `(n_q, H)`.
        key_sizes: Root mean squares of the entries of each key cluster, `(n_k, H)`.
        mass: Fraction of pairs of tokens in each pair of clusters, `(n_q, n_k)`.
    """

    query_centers: Any
    key_centers: Any
    query_sizes: Any
    key_sizes: Any
    mass: Any

    def diagonal(self, i, j, is_real):
        """Returns the diagonal of A, `(H,)`, for query cluster i and key cluster j."""
        if is_real:
            return diagonal(self.query_sizes[i], self.key_sizes[j], is_real=True)
        return diagonal(self.query_centers[i], self.key_centers[j], is_real=False)


def find_clusters(feature_map, samples):
    """Returns the `Clusters` of each head of a map, which k-means finds in samples.

    Raises:
        ImportError: If scikit-learn is missing.
        ValueError: If there are fewer tokens than clusters.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise ImportError(
            "Clustering needs scikit-learn. Install it: pip install scikit-learn."
        ) from error

    clusters = []
    for head in range(feature_map.num_heads):
        centers, sizes, shares = [], [], []
        for side, count in enumerate(feature_map.num_clusters):
            tokens = np.concatenate([sample[side][head] for sample in samples])
            if len(tokens) < count:
                raise ValueError(
                    "`num_clusters` must be at most the number of tokens. Received: "
                    f"{count} clusters, {len(tokens)} tokens. Give `calibrate` more "
                    "data."
                )
            seed = derive_seed(feature_map.seed, head, side)
            found = KMeans(count, n_init=4, random_state=seed).fit(tokens)
            members = np.eye(count)[found.labels_]
            number = np.maximum(members.sum(0), 1)[:, None]
            centers.append(found.cluster_centers_)
            sizes.append(np.sqrt(members.T @ tokens**2 / number))
            shares.append(members.mean(0))
        clusters.append(Clusters(*centers, *sizes, np.outer(*shares)))
    return clusters
