"""What closed forms say about a feature map, pair by pair."""

import numpy as np
from keras import ops

from keras_rfattn import feature_maps as maps
from keras_rfattn.kernels import variance


def predicted_variance(feature_map, head=0, stats=None):
    """The relative variance of a map's estimates, from its closed form.

    For independent vectors; orthogonal ones do no worse.

    Args:
        feature_map: A built `FeatureMap`.
        head: Which key/value head.
        stats: FAVOR++'s parameter A, where it is not stored.

    Returns:
        A function `(query, key) -> variance / kernel²`, `(T, H)` and `(S, H)` to
        `(T, S)`, or `None` if no closed form is known.
    """
    moment = log_moment(feature_map, head, stats)
    if moment is None:
        return None

    def relative(query, key):
        result = np.empty((len(query), len(key)))
        for row, q in enumerate(query):
            x = np.broadcast_to(q, key.shape)
            log_variance = variance.log_variance(moment(x, key), x, key)
            with np.errstate(over="ignore"):
                result[row] = np.exp(log_variance - 2 * key @ q)
        return result / feature_map.num_features

    return relative


def _number(weight, head):
    return ops.convert_to_numpy(weight)[head].astype("float64")


def log_moment(feature_map, head=0, stats=None):
    """The second moment of a map's estimates of softmax, from its closed form.

    Args:
        feature_map: A built `FeatureMap`.
        head: Which key/value head.
        stats: FAVOR++'s parameter A, where it is not stored.

    Returns:
        A function `(x, y) -> log E[Z²]` of one draw Z for pairs `(..., H)`, or `None`
        if no closed form is known; see `keras_rfattn.kernels.variance`.
    """
    general = variance.log_moment_generalized_exponential
    if type(feature_map) is maps.Favor:
        return lambda x, y: general(x, y, 0, -1)
    if type(feature_map) is maps.FavorPlus and not feature_map.pair:
        return general
    if type(feature_map) is maps.FavorPP and not feature_map.per_direction:
        if stats is None and not feature_map.is_calibrated:
            return None
        if stats is None:
            stats = feature_map.optimal_a(feature_map.mean_square)
        a = float(np.ravel(ops.convert_to_numpy(stats)[..., head]).mean())
        return lambda x, y: general(x, y, a)
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
