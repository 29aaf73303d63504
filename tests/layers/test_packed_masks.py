"""What travels with a packed row: masks, statistics, windows, temperature, heads."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers import GroupedQueryAttention
from tests import helpers as h
from tests.marks import ONE_BACKEND, first

DIM, HEADS, LENGTH = 8, 2, 12
# Texts of 5 and 7 tokens, and of 9 and 3, so that each has slots without a token.
IDS = np.array([[0] * 5 + [1] * 7, [4] * 9 + [2] * 3], "int32")
MASKED = {"none": (), "key": ("key_mask",), "query": ("query_mask",),
          "both": ("key_mask", "query_mask")}  # fmt: skip
LAYERS = {
    "favorpp": {"feature_map": "favorpp"},
    "favorplus": {"feature_map": "favorplus"},
    "window": {"feature_map": "favorpp", "window": 2},
    "sliding": {"feature_map": "favorpp", "window": 2, "sliding": True},
    "softmax head": {"feature_map": "favorpp", "softmax_heads": [1]},
    "temperature": {"feature_map": "favorpp", "temperature": 0.5},
}


def made(name, **options):
    # Keras' other layer ignores the argument `query_mask`.
    layer = GroupedQueryAttention(
        4, HEADS, HEADS, num_features=12, seed=0, **LAYERS[name], **options
    )
    keras.utils.set_random_seed(1)
    layer.build((None, None, DIM), (None, None, DIM))
    generator = np.random.default_rng(2)
    for weight in layer.trainable_weights:
        if weight.path.endswith("kernel"):
            weight.assign(0.4 * generator.normal(size=weight.shape))
    return layer


def problem(masked):
    generator = np.random.default_rng(0)
    # Of other sizes in the two texts, so that their statistics differ.
    size = np.where(IDS == IDS[:, :1], 0.3, 1.5)[..., None]
    x = (size * generator.normal(size=(2, LENGTH, DIM))).astype("float32")
    hidden = {"key_mask": [[3, 7], [10, 1]], "query_mask": [[1, 3, 8, 11], [2, 5, 10]]}
    masks = {}
    for name in MASKED[masked]:
        masks[name] = np.ones((2, LENGTH), bool)
        for row, places in zip(masks[name], hidden[name], strict=True):
            row[places] = False
    return x, masks


def apart(layer, x, masks, causal):
    """Each text in a call of its own."""
    found = np.zeros_like(x)

    @h.one_program
    def call(own, its):
        return layer(own, own, use_causal_mask=causal, **its)

    for row, ids in enumerate(IDS):
        for text in np.unique(ids):
            (places,) = np.nonzero(ids == text)
            own = ops.convert_to_tensor(x[row, places][None])
            its = {k: ops.convert_to_tensor(m[row, places][None])
                   for k, m in masks.items()}  # fmt: skip
            found[row, places] = h.to_numpy(call(own, its))[0]
    return found


def real(masks):
    """Tokens whose row means something."""
    return masks.get("query_mask", masks.get("key_mask", np.ones_like(IDS, bool)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("name", first(LAYERS))
def test_values_at_hand(name, masked, causal):
    usual = name == "favorpp" and masked == "both" and not causal
    if keras.backend.backend() != "torch" and not usual:
        pytest.skip("compiled for seconds; run on PyTorch")
    layer, (x, masks) = made(name), problem(masked)
    tokens = ops.convert_to_tensor(x)
    found = layer(tokens, tokens, segment_ids=IDS, use_causal_mask=causal, **masks)
    expected = apart(layer, x, masks, causal)
    rows = real(masks)
    h.assert_close(h.to_numpy(found)[rows], expected[rows], rtol=1e-5)


@pytest.mark.parametrize("masked", ["query", pytest.param("both", marks=ONE_BACKEND)])
def test_inside_a_compiled_function(masked):
    x, masks = problem(masked)
    inputs = {"x": x, "ids": IDS, **masks}
    symbols = {
        k: keras.Input(v.shape[1:], dtype=v.dtype.name, name=k)
        for k, v in inputs.items()
    }
    layer = made("favorpp", max_segments=3)
    given = {k: symbols[k] for k in masks}
    output = layer(symbols["x"], symbols["x"], segment_ids=symbols["ids"], **given)
    model = keras.Model(symbols, output)
    found = model.predict(inputs, verbose=0)
    rows = real(masks)
    expected = apart(layer, x, masks, causal=False)
    h.assert_close(found[rows], expected[rows], rtol=1e-5)
