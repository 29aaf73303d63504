"""Packed rows against rows of their own, forward and backward."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention
from keras_rfattn.ops import AttentionMask
from tests import helpers as h
from tests.marks import ONE_BACKEND, first, slow_on_jax

DIM, HEADS, LENGTH = 8, 2, 15
# Texts of row 0 and of row 1; one of the second is not in one piece.
IDS = np.array([[5] * 5 + [2] * 10, [1] * 3 + [-7] * 5 + [1] * 7])
MANY = np.array([[5] * 5 + [2] * 10, [1, 1, 0, 0, 0, 1, 1, 1, 9, 9, 9, 9, 9, 9, -4]])
MECHANISMS = {
    "favorpp": {"feature_map": "favorpp"},
    "windowed": {"feature_map": "favorplus", "window": 2},
    "sliding": {"feature_map": "favorplus", "window": 2, "sliding": True},
    "signed": {"feature_map": "poisson"},
    "polynomial": {"feature_map": "polysketch"},
    "exact": {"feature_map": "polynomial"},
    "elu": {"feature_map": "elu"},
    "softmax head": {"feature_map": "favorplus", "softmax_heads": [1]},
}  # fmt: skip


def made(mechanism="favorpp", kv_heads=HEADS, **kwargs):
    arguments = {**MECHANISMS[mechanism], "seed": 0, **kwargs}
    if mechanism not in ("elu", "exact", "polynomial"):
        arguments["num_features"] = 12
    if kv_heads == HEADS:
        layer = MultiHeadAttention(HEADS, 4, **arguments)
    else:
        layer = GroupedQueryAttention(4, HEADS, kv_heads, **arguments)
    keras.utils.set_random_seed(1)
    layer.build((None, None, DIM), (None, None, DIM))
    generator = np.random.default_rng(2)
    # Queries and keys so small that no denominator of a signed estimate is near 0.
    scale = 0.2 if mechanism == "signed" else 0.7
    for weight in layer.trainable_weights:
        if weight.path.endswith("kernel"):
            weight.assign(scale * generator.normal(size=weight.shape))
    return layer


def inputs():
    return np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")


def one_by_one(layer, x, visible, causal):
    """Each text in a call of its own."""
    rows = []
    for row, ids, seen in zip(
        ops.unstack(ops.convert_to_tensor(x)), IDS, visible, strict=True
    ):
        found = ops.zeros((LENGTH, DIM))
        for text in np.unique(ids):
            (places,) = np.nonzero(ids == text)
            own = ops.take(row, places, axis=0)[None]
            mask = seen[None, None, places]
            output = layer(own, own, attention_mask=mask, use_causal_mask=causal)[0]
            found = ops.scatter_update(found, places[:, None], output)
        rows.append(found)
    return ops.stack(rows)


@slow_on_jax
@pytest.mark.parametrize("causal", first([True, False]))
@pytest.mark.parametrize(
    ("mechanism", "kv_heads"),
    [("favorpp", HEADS), pytest.param("sliding", 1, marks=ONE_BACKEND)]
    + [pytest.param(x, HEADS, marks=ONE_BACKEND) for x in MECHANISMS if x != "favorpp"],
)
def test_packed_is_separate(mechanism, kv_heads, causal):
    layer, x = made(mechanism, kv_heads), inputs()
    visible = np.ones((2, LENGTH), bool)
    visible[0, [0, 1, 9]] = False
    weights = np.random.default_rng(1).normal(size=x.shape).astype("float32")

    def packed(x):
        mask = visible[:, None]
        return layer(x, x, segment_ids=IDS, attention_mask=mask, use_causal_mask=causal)

    def separate(x):
        return one_by_one(layer, x, visible, causal)

    # What padding sees, no one does. In a program the texts' places were unknown.
    x = ops.convert_to_tensor(x)
    found, expected = (
        ops.convert_to_numpy(f(x))[visible] for f in (packed, h.one_program(separate))
    )
    scale = np.abs(expected).max()
    assert scale > 0.1 and np.abs(found - expected).max() <= 1e-6 * scale
    weights = weights * visible[..., None]
    found, expected = (
        h.gradients(lambda x, f=f: ops.multiply(f(x), weights), x, compiles=compiles)[0]
        for f, compiles in ((packed, False), (separate, True))
    )
    scale = np.abs(expected).max()
    assert scale > 0.1 and np.abs(found - expected).max() <= 5e-6 * scale


def model_of(max_segments=3, **kwargs):
    """A functional model, whose values of `segment_ids` nobody knows beforehand."""
    x, ids = keras.Input((LENGTH, DIM)), keras.Input((LENGTH,), dtype="int32")
    layer = made(max_segments=max_segments, **kwargs)
    return keras.Model([x, ids], layer(x, x, segment_ids=ids, use_causal_mask=True))


def test_packing_inside_compiled_functions(tmp_path):
    model, x = model_of(), inputs()
    ids = IDS[[0, 0]].astype("int32")
    expected = ops.convert_to_numpy(made()(x, x, segment_ids=ids, use_causal_mask=True))
    h.assert_close(model.predict([x, ids], verbose=0), expected)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    h.assert_close(again.predict([x, ids], verbose=0), expected)
    model.compile("sgd", "mse")
    before = [ops.convert_to_numpy(w) for w in model.trainable_weights]
    model.fit([x, ids], x, verbose=0)
    assert any(
        (ops.convert_to_numpy(w) != b).any()
        for w, b in zip(model.trainable_weights, before, strict=True)
    )
    # Four texts where there is room for three: nothing is lost in silence.
    many = MANY.astype("int32")
    if keras.backend.backend() == "torch":
        with pytest.raises(ValueError, match="4 of them, max_segments=3"):
            model.predict([x, many], verbose=0)
    else:
        found = model.predict([x, many], verbose=0)
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).any()


@slow_on_jax
def test_packing_of_a_block():
    keras_hub = pytest.importorskip("keras_hub")
    block = keras_hub.layers.TransformerDecoder(16, HEADS)
    block.build((None, None, DIM))
    keras_rfattn.replace_attention(block, "favorplus", num_features=8, seed=0)
    x, ids = inputs()[:1], IDS[:1]

    @h.one_program
    def separate(x):
        return ops.concatenate([block(x[:, :5]), block(x[:, 5:])], axis=1)

    x = ops.convert_to_tensor(x)
    found = block(x, decoder_attention_mask=AttentionMask(segment_ids=ids))
    h.assert_close(found, separate(x), rtol=1e-6)


def test_bad_packing():
    layer, x = made(max_segments=2), inputs()
    with pytest.raises(ValueError, match="more texts than.*4 of them, max_segments=2"):
        layer(x, x, segment_ids=MANY)
    with pytest.raises(ValueError, match=r"shape \(B, T\).*Received: shape \(2, 14\)"):
        layer(x, x, segment_ids=IDS[:, 1:])
    with pytest.raises(ValueError, match="need self-attention.*cross-attention"):
        made(max_segments=2, self_attention=False)(x, x + 1, segment_ids=IDS)
    with pytest.raises(ValueError, match="`max_segments` must be a positive integer"):
        made(max_segments=0)
    if keras.backend.backend() != "torch":
        model = model_of(max_segments=None)
        with pytest.raises(ValueError, match="Received: max_segments=None. Set it"):
            model.predict([x, IDS], verbose=0)
    # What was refused is forgotten.
    h.assert_close(
        ops.convert_to_numpy(layer(x, x)), ops.convert_to_numpy(made()(x, x))
    )
