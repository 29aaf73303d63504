"""Layers share compiled programs only if their maps compute the same."""

import numpy as np
from keras import ops

import keras_rfattn.feature_maps as maps
from keras_rfattn.layers import attend
from keras_rfattn.ops import AttentionMask
from tests import helpers as h


def test_maps_of_one_name_in_two_modules_are_two():
    def mine(factor, module):
        def key_features(self, x):
            return maps.FavorPlus.key_features(self, factor * x)

        body = {"__module__": module, "key_features": key_features}
        return type("Mine", (maps.FavorPlus,), body)

    rng = np.random.default_rng(0)
    x = ops.convert_to_tensor(rng.normal(size=(1, 9, 2, 6)).astype("float32"))
    outputs = []
    for factor, module in ((1.0, "one"), (2.0, "two")):
        feature_map = mine(factor, module)(8, seed=3)
        feature_map.build((None, None, 2, 6))
        mask = AttentionMask(causal=True)
        outputs.append(h.to_numpy(attend(x, x, x, feature_map, mask)))
    assert np.max(np.abs(outputs[0] - outputs[1])) > 1e-3
