"""Feature maps as pure functions, which algorithms can call inside a loop."""

import functools
import weakref

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend.precision import wide_dtype
from keras_rfattn.ops.features import Marked, map_features
from keras_rfattn.ops.not_finite import apart, flowing, limited

# Config entries that do not change the function of given weights.
IGNORED = ("name", "trainable", "dtype", "seed", "projection", "module")


class FeatureFunction:
    """Pure function `(x, (stats, values)) -> Marked` for a method of a feature map.

    `values` are the values of the map's variables. Two such functions are equal if they
    compute the same result from the same values, so that all layers of a model can
    share a compiled program. The function holds only a weak reference to the map,
    because a compiled program can outlive its model.

    Args:
        feature_map: A built `FeatureMap`.
        method: `"query_features"` or `"key_features"`.
    """

    def __init__(self, feature_map, method):
        self.reference, self.method = weakref.ref(feature_map), method

    @functools.cached_property
    def identity(self):
        """Hashable key that equal functions share."""
        feature_map = self.reference()
        shape = feature_map.num_heads, feature_map.head_dim
        return type(feature_map), repr(essence(feature_map)), self.method, shape

    @property
    def is_exponential(self):
        """Whether `heads_first` returns exponents that no other object references."""
        return self.reference().has_exponents

    def __eq__(self, other):
        return isinstance(other, FeatureFunction) and self.identity == other.identity

    def __hash__(self):
        return hash(self.identity)

    def __call__(self, x, parameters):
        feature_map, stats, scope = self._given(parameters)
        with scope:
            method = getattr(type(feature_map), self.method)
            return method.marked(feature_map, x, stats)

    def _given(self, parameters):
        """Returns the map, its statistics, and a scope that sets the given weights."""
        feature_map, (stats, values) = self.reference(), parameters
        pairs = list(zip(feature_map.variables, values, strict=True))
        return feature_map, stats, keras.StatelessScope(pairs)

    def heads_first(
        self, x, parameters, is_relative=False, is_lazy=False, is_apart=True
    ):
        """Computes features for heads that come before tokens.

        Args:
            x: Array of shape `(B, K, R, H)`, for batch B, K key/value heads and head
                dim H. R counts rows: each token has G adjacent rows, one for each query
                head of the group.
            parameters: `(stats, values)`, as in a call.
            is_relative: Whether a factor that a token's features share may be omitted.
            is_lazy: Whether the result may hold `Exponents` instead of computed
                features.
            is_apart: Whether tokens with non-finite entries are marked. If not, and if
                the map has exponents, their features are NaN.

        Returns:
            `Marked` features of shape `(B, K, R, M)`.
        """
        feature_map, stats, scope = self._given(parameters)
        tokens = ops.swapaxes(x, 1, 2)
        if not feature_map.has_exponents:
            found = limited(self(tokens, parameters))
            return map_features(lambda x: ops.swapaxes(x, 1, 2), found)
        tokens = ops.cast(tokens, wide_dtype(tokens))
        tokens, spoiled = apart(tokens) if is_apart else flowing(tokens)
        with scope:
            found = feature_map.exponents(self.method, tokens, stats)
            x, common = ops.swapaxes(found.x, 1, 2), None
            if not is_relative:
                common = feature_map.common_exponent(self.method, x, stats)
        found = found._replace(x=x, common=common)
        found = found if is_lazy else found.compute()
        return Marked(found, ops.swapaxes(spoiled, 1, 2))


def essence(feature_map):
    """Returns what decides a map's function besides its weights, seeds and names."""
    return type(feature_map).__name__, _essence(feature_map.get_config())


def _essence(config):
    if isinstance(config, dict):
        kept = sorted(key for key in config if key not in IGNORED)
        return [(key, _essence(config[key])) for key in kept]
    if isinstance(config, (list, tuple)):
        return [_essence(item) for item in config]
    # A saved file turns NumPy scalars into Python numbers, which must compare equal.
    return config.item() if isinstance(config, np.generic) else config


def complete(cls):
    """Wraps the feature methods of a `FeatureMap` subclass, so that it keeps law 7.

    It also clears `has_exponents` if the class overrides a feature method, but not
    `exponents`.
    """
    names = "query_features", "key_features"
    for name in names:
        # `getattr`, because the method may come from a mixin.
        method = getattr(cls, name)
        if not hasattr(method, "marked"):
            setattr(cls, name, of_finite_tokens(method))
    # Inherited `exponents` do not match features that a subclass overrides.
    if min(_owner(cls, name) for name in names) < _owner(cls, "exponents"):
        cls.has_exponents = False


def _owner(cls, name):
    """Returns the position in the class hierarchy at which a method is defined."""
    return next(i for i, x in enumerate(cls.__mro__) if name in vars(x))


def of_finite_tokens(method):
    """Wraps `query_features` or `key_features`, so that it keeps law 7.

    The wrapped method returns NaN for tokens with non-finite entries. Its attribute
    `marked` is a function that returns `Marked` features instead.
    """

    def marked(self, x, stats=None):
        if not self.built:
            raise ValueError(
                f"`{type(self).__name__}` must be built before it computes features. "
                "Received: built=False. Call `build((None, None, num_heads, "
                "head_dim))` first."
            )
        x = ops.cast(x, wide_dtype(x))
        x, spoiled = apart(x)
        return Marked(method(self, x, stats), spoiled)

    @functools.wraps(method)
    def features(self, x, stats=None):
        found, spoiled = marked(self, x, stats)
        return found._replace(log_scale=found.log_scale + spoiled)

    features.marked = marked
    return features
