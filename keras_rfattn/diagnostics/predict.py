"""What closed forms say about a feature map, pair by pair."""

import numpy as np
from keras import ops

from keras_rfattn import feature_maps as maps
from keras_rfattn.kernels import variance
from keras_rfattn.projections import Orthogonal

# Pairs at once, which bounds the memory.
SLICE = 2**15


def predicted_variance(feature_map, head=0, stats=None):
    """The relative variance of a map's estimates, from its closed form.

    Exact for independent vectors, and for orthogonal ones of generalized exponential
    features with one A; else as if vectors were independent.

    Args:
        feature_map: A built `FeatureMap`.
        head: Which key/value head.
        stats: What `feature_map.statistics` gives, where its parameters are not
            stored.

    Returns:
        A function `(queries, keys) -> variance / kernel²` of pairs, `(..., H)` twice
        to `(...)`, or `None` if no closed form is known.
    """
    conditioned, feature_map = feature_map, innermost(feature_map)
    moment = log_moment(feature_map, head, stats)
    if moment is None:
        return None
    covariance = _covariance(feature_map, head)

    def relative(query, key):
        x, y = seen(conditioned, query, key, head)
        with np.errstate(over="ignore"):
            log_variance = variance.log_variance(moment(x, y), x, y)
            independent = np.exp(log_variance - 2 * np.sum(x * y, -1))
        total = np.maximum(independent + covariance(x, y), 0)
        return total / feature_map.num_features

    def in_slices(query, key):
        shape = query.shape[:-1]
        query, key = (v.reshape(-1, v.shape[-1]) for v in (query, key))
        starts = range(0, len(query), SLICE)
        found = [relative(query[i : i + SLICE], key[i : i + SLICE]) for i in starts]
        return np.concatenate(found).reshape(shape) if found else np.zeros(shape)

    return in_slices


def innermost(feature_map):
    """The map inside all conditioning."""
    while isinstance(feature_map, maps.Conditioned):
        feature_map = feature_map.inner
    return feature_map


def seen(feature_map, query, key, head=0):
    """What the random vectors meet: queries and keys after conditioning, if any."""
    if not isinstance(feature_map, maps.Conditioned):
        return query, key
    sides = (
        (query, feature_map.query_matrix, feature_map.query_center),
        (key, feature_map.key_matrix, feature_map.key_center),
    )
    query, key = ((x - _number(c, head)) @ _number(a, head).T for x, a, c in sides)
    return seen(feature_map.inner, query, key, head)


def sign(feature_map, head=0):
    """The s of `‖x + s y‖²`, with which a map's variance grows."""
    feature_map = innermost(feature_map)
    if type(feature_map) is maps.Gerf:
        return int(_number(feature_map.parameters, head)[2])
    return -1 if type(feature_map) is maps.Favor else 1


def log_moment(feature_map, head=0, stats=None):
    """The second moment of a map's estimates of softmax, from its closed form.

    Args:
        feature_map: A built `FeatureMap`.
        head: Which key/value head.
        stats: What `feature_map.statistics` gives, where its parameters are not
            stored.

    Returns:
        A function `(x, y) -> log E[Z²]` of one draw Z for pairs `(..., H)`, or `None`
        if no closed form is known; see `keras_rfattn.kernels.variance`.
    """
    general = variance.log_moment_generalized_exponential
    if type(feature_map) is maps.Favor:
        return lambda x, y: general(x, y, 0, -1)
    if type(feature_map) is maps.FavorPlus:
        return variance.log_moment_positive_pair if feature_map.pair else general
    if type(feature_map) is maps.FavorPP:
        return _optimal_positive(feature_map, head, stats)
    if type(feature_map) is maps.Gerf:
        real, imaginary, s = _number(feature_map.parameters, head)
        return lambda x, y: general(x, y, complex(real, imaginary), int(s))
    if isinstance(feature_map, (maps.Poisson, maps.Geometric)):
        return _discrete(feature_map, head)
    if type(feature_map) is maps.ComplexExponential:
        a = _number(feature_map.matrix, head)
        a = a if feature_map.form == "full" else a[0] + 1j * a[1]
        return lambda x, y: variance.log_moment_complex_exponential(x, y, a)
    return None


def _number(weight, head):
    return ops.convert_to_numpy(weight)[head].astype("float64")


def _optimal_positive(feature_map, head, stats):
    if stats is None and not feature_map.is_calibrated:
        return None
    if stats is None:
        stats = feature_map.optimal_a(feature_map.mean_square)
    stats = ops.convert_to_numpy(stats).astype("float64")
    if feature_map.per_direction:
        a = stats.reshape(-1, *stats.shape[-2:])[:, head].mean(0)
        return lambda x, y: variance.log_moment_per_direction(x, y, a)
    a = float(stats[..., head].mean())
    return lambda x, y: variance.log_moment_generalized_exponential(x, y, a)


def _discrete(feature_map, head):
    is_poisson = isinstance(feature_map, maps.Poisson)
    moment = variance.log_moment_poisson
    moment = moment if is_poisson else variance.log_moment_geometric
    parameter = _number(feature_map.parameter, head)
    if not feature_map.is_positive:
        return lambda x, y: moment(x * y, parameter)
    shift = _number(feature_map.shift, head)

    def shifted(x, y):
        of_shifted = moment((x - shift) * (y - shift), parameter)
        return variance.log_moment_shifted(of_shifted, x, y, shift)

    return shifted


def _covariance(feature_map, head):
    """What orthogonal vectors add to the relative variance of one draw."""
    projection = feature_map.projection
    known = (maps.Favor, maps.FavorPlus, maps.FavorPP, maps.Gerf)
    if (
        type(feature_map) not in known
        or getattr(feature_map, "per_direction", False)
        or not isinstance(projection, Orthogonal)
        or projection.norms != "chi"
    ):
        return lambda x, y: 0.0
    s = sign(feature_map, head)
    dim, count = feature_map.head_dim, feature_map.num_features
    full, rest = divmod(count, dim)
    others = (full * dim * (dim - 1) + rest * (rest - 1)) / count
    return lambda x, y: others * variance.orthogonal_covariance(x, y, s)
