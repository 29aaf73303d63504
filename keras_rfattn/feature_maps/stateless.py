"""Feature maps as pure functions, which algorithms may call within a loop."""

import functools
import weakref

import keras
import numpy as np
from keras import ops

from keras_rfattn.ops.features import Marked
from keras_rfattn.ops.features import map_features
from keras_rfattn.ops.not_finite import apart
from keras_rfattn.ops.not_finite import flowing
from keras_rfattn.ops.not_finite import limited
from keras_rfattn.ops.precision import wide_dtype

IGNORED = ("name", "trainable", "dtype", "seed", "projection")


class FeatureFunction:
    """`(x, (stats, values)) -> Marked`: a method of a map with its weights given.

    Equal to the same method of any map that computes the same of the same weights, so
    that all layers of a model share a compiled program. It does not keep the map
    alive, as a program outlives the model it was compiled for.

    Args:
        feature_map: A built `FeatureMap`.
        method: `"query_features"` or `"key_features"`.
    """

    def __init__(self, feature_map, method):
        self.reference, self.method = weakref.ref(feature_map), method

    @functools.cached_property
    def identity(self):
        """What equal functions share."""
        feature_map = self.reference()
        shape = feature_map.num_heads, feature_map.head_dim
        return type(feature_map), repr(essence(feature_map)), self.method, shape

    @property
    def is_exponential(self):
        """Whether `heads_first` gives exponents alone, which nothing else holds."""
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
        """The map, its statistics, and a scope in which its weights are those given."""
        feature_map, (stats, values) = self.reference(), parameters
        pairs = list(zip(feature_map.variables, values, strict=True))
        return feature_map, stats, keras.StatelessScope(pairs)

    def heads_first(
        self, x, parameters, is_relative=False, is_lazy=False, is_apart=True
    ):
        """The same of `(B, K, R, H)`, as `Marked` `(B, K, R, M)`.

        Args:
            x: G rows beside each other for each token, of the heads of a group.
            parameters: As in a call.
            is_relative: Whether a factor for each token may be left out.
            is_lazy: Whether the features may be `Exponents`, yet to be computed.
            is_apart: Whether tokens that are not finite are marked; otherwise they are
                NaN, where the map has exponents.
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
    """What decides a map's function, whatever its seeds, names and weights."""
    cls = type(feature_map)
    # Of the class itself: a subclass computes something else.
    name = vars(cls).get("former_name") or cls.__name__
    return name, _essence(feature_map.get_config())


def _essence(config):
    if isinstance(config, dict):
        kept = sorted(key for key in config if key not in IGNORED)
        return [(key, _essence(config[key])) for key in kept]
    if isinstance(config, (list, tuple)):
        return [_essence(item) for item in config]
    # A number of NumPy is the same number in a file.
    return config.item() if isinstance(config, np.generic) else config


def complete(cls):
    """Makes a subclass of `FeatureMap` keep law 7, and say what it knows alone."""
    names = "query_features", "key_features"
    for name in names:
        # Looked up, as it may come from a mixin.
        method = getattr(cls, name)
        if not hasattr(method, "marked"):
            setattr(cls, name, of_finite_tokens(method))
    # Exponents of a parent say nothing of features that a subclass changes.
    if min(_owner(cls, name) for name in names) < _owner(cls, "exponents"):
        cls.has_exponents = False


def _owner(cls, name):
    """How far up the class is that defines a method."""
    return next(i for i, x in enumerate(cls.__mro__) if name in vars(x))


def of_finite_tokens(method):
    """`query_features` or `key_features` by law 7; its `marked` gives `Marked`."""

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
