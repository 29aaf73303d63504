"""Feature maps as pure functions, which algorithms can call inside a loop."""

import functools
import weakref

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import wide_dtype

# Config entries that do not change the function of given weights.
IGNORED = ("name", "trainable", "dtype", "seed", "projection", "module")


class FeatureFunction:
    """Pure function `(x, (stats, values)) -> Features` for a method of a feature map.

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
        # The essence has only names of classes, which two modules may share.
        classes = tuple(type(part) for part in feature_map._flatten_layers())
        return classes, repr(essence(feature_map)), self.method, shape

    @property
    def has_exponents(self):
        """Whether `heads_first` returns `Exponents`."""
        return self.reference().has_exponents

    def __eq__(self, other):
        return isinstance(other, FeatureFunction) and self.identity == other.identity

    def __hash__(self):
        return hash(self.identity)

    def __call__(self, x, parameters):
        feature_map, stats, scope = self._given(parameters)
        with scope:
            return getattr(feature_map, self.method)(x, stats)

    def _given(self, parameters):
        """Returns the map, its statistics, and a scope that sets the given weights."""
        feature_map, (stats, values) = self.reference(), parameters
        pairs = list(zip(feature_map.variables, values, strict=True))
        return feature_map, stats, keras.StatelessScope(pairs)

    def heads_first(self, x, parameters):
        """Computes features `(B, K, R, M)` of x, `(B, K, R, H)`, with heads first."""
        if not self.has_exponents:
            features = self(ops.swapaxes(x, 1, 2), parameters)
            return features.of_tokens(lambda x: ops.swapaxes(x, 1, 2))
        return self.exponents(x, parameters)

    def exponents(self, x, parameters):
        """Returns the `Exponents` of x, `(B, K, R, H)`."""
        feature_map, stats, scope = self._given(parameters)
        tokens = ops.swapaxes(x, 1, 2)
        tokens = ops.cast(tokens, wide_dtype(tokens))
        with scope:
            exponents = feature_map.exponents(self.method, tokens, stats)
            x = ops.swapaxes(exponents.x, 1, 2)
            common = feature_map.common_exponent(self.method, x, stats)
        return exponents._replace(x=x, common=common)


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
    """Wraps the feature methods of a `FeatureMap` subclass, so that it keeps law 5."""
    names = "query_features", "key_features"
    for name in names:
        # `getattr`, because the method may come from a mixin.
        method = getattr(cls, name)
        if not hasattr(method, "__wrapped__"):
            setattr(cls, name, in_float32(method))
    # Inherited `exponents` do not match features that a subclass overrides.
    if min(_owner(cls, name) for name in names) < _owner(cls, "exponents"):
        cls.has_exponents = False


def _owner(cls, name):
    """Returns the position in the class hierarchy at which a method is defined."""
    return next(i for i, x in enumerate(cls.__mro__) if name in vars(x))


def in_float32(method):
    """Wraps `query_features` or `key_features`, so that `x` is float32 or wider."""

    @functools.wraps(method)
    def features(self, x, stats=None):
        if not self.built:
            raise ValueError(
                f"`{type(self).__name__}` must be built before it computes features. "
                "Received: built=False. Call `build((None, None, num_heads, "
                "head_dim))` first."
            )
        return method(self, ops.cast(x, wide_dtype(x)), stats)

    return features
