import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.papers import KernelFeatures
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import each_map

pytestmark = pytest.mark.once

SOFTMAX = h.names(kernel="softmax")
X = (0.4 * np.random.default_rng(0).normal(size=(12, 3))).astype("float32")


@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
@pytest.mark.parametrize("name", each_map(SOFTMAX))
def test_products_approximate_the_kernel(name, kernel):
    wide = {"num_features": case(name).wide} if h.has_num_features(name) else {}
    feature_map = feature_maps.get(name, seed=1, **{**h.small(name), **wide})
    if not feature_map.is_unbiased:
        pytest.skip(f"{name} does not claim to be unbiased")
    layer = KernelFeatures(feature_map, kernel, gamma=0.8)
    layer.adapt(X)
    x = np.float64(X) * np.sqrt(1.6)
    expected = np.exp(x @ x.T)
    if kernel == "gaussian":
        half = np.diagonal(expected) ** 0.5
        expected = expected / (half[:, None] * half)
    query, key = (
        h.to_numpy(h.one_program(functools.partial(layer, side=side))(X))
        for side in ("query", "key")
    )
    assert query.shape == (12, feature_map.output_dim)
    assert layer.compute_output_shape((12, 3)) == query.shape
    if feature_map.is_symmetric:
        h.assert_same(query, key)
    assert np.mean(np.abs(query @ key.T - expected)) < 0.15 * np.mean(expected)


def test_leading_dimensions_and_saving(tmp_path):
    inputs = keras.Input((5, 3))
    layer = KernelFeatures("favorpp", num_features=16, seed=2)
    layer.adapt(X)
    model = keras.Model(inputs, keras.layers.Dense(2)(layer(inputs)))
    x = X[:10].reshape(2, 5, 3)
    h.assert_same(h.to_numpy(layer(x)).reshape(10, -1), layer(X[:10]))
    path = str(tmp_path / "model.keras")
    model.save(path)
    h.assert_same(keras.saving.load_model(path)(x), model(x))


def test_errors():
    for arguments in ({"kernel": "laplace"}, {"gamma": 0}, {"feature_map": "elu"}):
        with pytest.raises(ValueError, match="`kernel` must be one of"):
            KernelFeatures(**arguments)
    layer = KernelFeatures(num_features=4)
    with pytest.raises(ValueError, match="`side` must be"):
        layer(ops.convert_to_tensor(X), side="value")
