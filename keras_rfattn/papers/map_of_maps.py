"""The base class of maps whose features are computed from those of other maps."""

from keras import ops

from keras_rfattn.backend import wide_dtype
from keras_rfattn.feature_maps.base import Bound, FeatureMap
from keras_rfattn.feature_maps.weights import Adaptive


class MapOfMaps(Adaptive, FeatureMap):
    """Base of maps of other maps, which `parts` returns.

    Subclasses implement `queries(parts, x)` and `keys(parts, x)`, which return features
    of scaled tokens. Their `parts` are the maps, or the maps bound to a call.
    """

    @property
    def is_adaptive(self):
        return any(part.is_adaptive for part in self.parts())

    @property
    def measures_sequence(self):
        return any(part.measures_sequence for part in self.parts())

    @property
    def is_unbiased(self):
        return all(part.is_unbiased for part in self.parts())

    def build(self, input_shape):
        super().build(input_shape)
        for part in self.parts():
            part.build(input_shape)

    def draw_again(self):
        for part in self.parts():
            part.draw_again()

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        tokens = (side * ops.cast(x, wide_dtype(x)) for x in (query, key))
        arguments = *tokens, 1.0, query_mask, key_mask, causal
        return BoundMaps(self, side, [part.bind(*arguments) for part in self.parts()])

    def query_features(self, x):
        return self.queries(self.parts(), x)

    def key_features(self, x):
        return self.keys(self.parts(), x)


class BoundMaps(Bound):
    """A `MapOfMaps` whose parts are bound to a call."""

    def __init__(self, feature_map, side, bound):
        super().__init__(feature_map, side)
        self.bound = bound

    def query_features(self, x):
        return self.queries(self.bound, self.side * ops.cast(x, wide_dtype(x)))

    def key_features(self, x):
        return self.keys(self.bound, self.side * ops.cast(x, wide_dtype(x)))
