"""Transformer++ and its mechanisms."""

import math

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.models import transformer_pp
from keras_rfattn.models.transformer_pp.positions import RotaryAttention
from tests import helpers as h
from tests.marks import ONE_BACKEND, first, first_on_jax

TINY = {"vocabulary_size": 40, "num_layers": 2, "num_heads": 2, "head_dim": 8}
MECHANISMS = {
    "softmax": {},
    "polynomial": {},
    "polysketch": {"num_features": 4, "window": 4},
    "polysketch_learned": {"num_features": 4, "window": 4, "sliding": True},
    "favorpp": {"num_features": 16},
}
# Millions, of appendix H.
SIZES = [
    ("small", None, "softmax", 110),
    ("small", 12, 64, 113),
    ("small", 12, 32, 111),
    ("small", 13, 64, 120),
    ("small", 13, 32, 118),
    ("small", 13, "random", 117),
    ("medium", None, "softmax", 337),
    ("medium", 24, 64, 341),
    ("medium", 24, 32, 337),
    ("medium", 26, 64, 367),
    ("medium", 26, 32, 362),
    ("large", None, "softmax", 748),
    ("large", 39, 64, 817),
    ("large", 39, 32, 811),
]


def build(name, seed=0, **arguments):
    keras.utils.set_random_seed(seed)
    options = {"seed": seed, **MECHANISMS[name]} if name != "softmax" else {}
    return transformer_pp("small", name, **TINY, **options, **arguments)


def tokens(length=18, seed=0):
    return np.random.default_rng(seed).integers(0, 40, (2, length)).astype("int32")


@pytest.fixture(scope="module")
def blocks():
    """Weights outside of blocks and in one, of each size."""

    def count(size):
        model = transformer_pp(size, num_layers=1)
        block = model.get_layer("block_0").count_params()
        return model.count_params() - block, block

    def zeros(self, shape, dtype=None, **kwargs):
        return keras.ops.zeros(shape, dtype)

    # To count weights one need not draw a hundred million of them.
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("RandomNormal", "RandomUniform", "GlorotUniform"):
            patch.setattr(getattr(keras.initializers, kind), "__call__", zeros)
        return {size: count(size) for size in ("small", "medium", "large")}


@pytest.mark.once
@pytest.mark.parametrize(
    ("size", "num_layers", "sketch", "millions"), first_on_jax(SIZES)
)
def test_parameters_are_those_of_the_paper(blocks, size, num_layers, sketch, millions):
    outside, block = blocks[size]
    if isinstance(sketch, int):
        feature_map = keras_rfattn.feature_maps.get(
            "polysketch_learned", num_features=sketch, seed=0
        )
        feature_map.build((None, None, 1, 64))
        block += feature_map.count_params()
    depth = num_layers or {"small": 12, "medium": 24, "large": 36}[size]
    total = outside + depth * block
    assert abs(total / (millions * 1e6) - 1) < 0.01


@pytest.mark.parametrize("name", first(reversed(MECHANISMS)))
def test_no_token_sees_the_future(name):
    model, x = build(name), tokens()
    other = x.copy()
    other[:, 11:] = (other[:, 11:] + 7) % 40
    first, second = (model.predict(a, verbose=0) for a in (x, other))
    assert first.shape == (2, 18, 40)
    h.assert_close(second[:, :11], first[:, :11], 1e-5)
    assert np.max(np.abs(second[:, 11:] - first[:, 11:])) > 1e-3


@pytest.mark.parametrize("name", first(reversed(MECHANISMS)))
def test_reloads(name, tmp_path):
    model, x = build(name), tokens()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    h.assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0), 1e-6)
    before = keras_rfattn.describe_attention(model)
    assert str(keras_rfattn.describe_attention(again)) == str(before)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize(
    "name", ["softmax", pytest.param("polysketch_learned", marks=ONE_BACKEND)]
)
def test_learns(name):
    model, x = build(name), tokens()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    history = model.fit(x[:, :-1], x[:, 1:], epochs=30, verbose=0).history["loss"]
    # Logits of variance 1 cost 1/2 more than uniform ones.
    assert abs(history[0] - math.log(40) - 0.5) < 0.5
    assert history[-1] < 1.0


def test_long_window_is_softmax():
    x, softmax = tokens(), build("softmax")
    expected = softmax.predict(x, verbose=0)
    keras_rfattn.replace_attention(softmax, "favorplus", window=18, seed=0)
    h.assert_close(softmax.predict(x, verbose=0), expected)
    assert "exact within 18 tokens" in str(keras_rfattn.describe_attention(softmax))
    keras_rfattn.restore_attention(softmax)
    keras_rfattn.replace_attention(softmax, "favorplus", window=4, seed=0)
    assert np.max(np.abs(softmax.predict(x, verbose=0) - expected)) > 1e-3


def test_positions_are_relative_in_rotation():
    from keras_rfattn.models.transformer_pp.positions import rotate

    x = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype("float32")
    query, key = (np.broadcast_to(a, (1, 30, 1, 8)) for a in x)
    products = np.einsum(
        "btnh,bsnh->ts", *(h.to_numpy(rotate(keras.ops.array(a))) for a in (query, key))
    )
    for distance in (0, 3, 17):
        diagonal = np.diag(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.std(products[0]) > 0.1


def test_bad_arguments():
    with pytest.raises(ValueError, match="`size` must be one of"):
        transformer_pp("huge")
    with pytest.raises(ValueError, match="Softmax attention takes no"):
        transformer_pp("small", window=4)
    for bad in ({"head_dim": 7}, {"num_heads": 0}, {"num_layers": -1}):
        with pytest.raises(ValueError, match="positive integers, and `head_dim` even"):
            transformer_pp("small", **{**TINY, **bad})
    with pytest.raises(ValueError, match="'softmax' or a feature map.*'softmx'"):
        transformer_pp("small", "softmx", **TINY)
    with pytest.raises(ValueError, match="`key_dim` must be even"):
        layer = RotaryAttention(2, 7)
        layer.build((1, 3, 8), (1, 3, 8))
    model = build("softmax")
    with pytest.raises(ValueError, match="`window` must be `None` for 'elu'"):
        keras_rfattn.replace_attention(model, "elu", window=4)
    with pytest.raises(ValueError, match="`sliding` needs a `window`"):
        keras_rfattn.replace_attention(model, "favorpp", sliding=True)
    with pytest.raises(ValueError, match="`sliding` must be `True` or `False`"):
        keras_rfattn.replace_attention(model, "favorpp", window=4, sliding="no")
    assert not keras_rfattn.describe_attention(model).replaced
