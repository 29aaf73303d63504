"""Transformer++ of the recipes: sizes, causality, saving."""

import keras
import numpy as np
import pytest

import keras_rfattn
from recipes.common.transformer_pp import rotate, transformer_pp
from tests import helpers as h

TINY = {"vocabulary_size": 40, "num_layers": 2, "num_heads": 2, "head_dim": 8}
MECHANISMS = {
    "softmax": {},
    "polysketch_learned": {"num_features": 4, "window": 4, "sliding": True, "seed": 0},
    "favorpp": {"num_features": 16, "seed": 0},
}
# Millions of weights, of appendix H.
SIZES = {"small": (12, 110), "medium": (24, 337), "large": (36, 748)}


def build(name):
    keras.utils.set_random_seed(0)
    return transformer_pp("small", name, **TINY, **MECHANISMS[name])


def tokens(length=18):
    return np.random.default_rng(0).integers(0, 40, (2, length)).astype("int32")


@pytest.mark.once
@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_the_paper(size, monkeypatch):
    def zeros(self, shape, dtype=None, **kwargs):
        return keras.ops.zeros(shape, dtype)

    # To count weights one need not draw a hundred million of them.
    for kind in ("RandomNormal", "RandomUniform", "GlorotUniform"):
        monkeypatch.setattr(getattr(keras.initializers, kind), "__call__", zeros)
    model = transformer_pp(size, num_layers=1)
    block = model.get_layer("block_0").count_params()
    depth, millions = SIZES[size]
    total = model.count_params() + (depth - 1) * block
    assert abs(total / (millions * 1e6) - 1) < 0.01


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_token_sees_the_future(name):
    model, x = build(name), tokens()
    other = x.copy()
    other[:, 11:] = (other[:, 11:] + 7) % 40
    first, second = (model.predict(a, verbose=0) for a in (x, other))
    assert first.shape == (2, 18, 40)
    h.assert_close(second[:, :11], first[:, :11], 1e-5)
    assert np.max(np.abs(second[:, 11:] - first[:, 11:])) > 1e-3


@pytest.mark.parametrize("name", MECHANISMS)
def test_reloads(name, tmp_path):
    model, x = build(name), tokens()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    h.assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0), 1e-6)
    before = keras_rfattn.describe_attention(model)
    assert str(keras_rfattn.describe_attention(again)) == str(before)


@pytest.mark.once
def test_positions_are_relative_in_rotation():
    x = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype("float32")
    query, key = (np.broadcast_to(a, (1, 30, 1, 8)) for a in x)
    products = np.einsum(
        "btnh,bsnh->ts", *(h.to_numpy(rotate(keras.ops.array(a))) for a in (query, key))
    )
    for distance in (0, 3, 17):
        diagonal = np.diag(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.std(products[0]) > 0.1
