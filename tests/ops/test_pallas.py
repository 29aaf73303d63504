"""The kernels for TPUs, in JAX's interpreter of them, against all pairs of tokens.

It fills memory with NaN, refuses to read beyond it, and looks for races.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask
from keras_rfattn.ops import Options
from keras_rfattn.ops import quadratic
from tests import helpers as h

on_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Pallas is a part of JAX"
)


def arrays(length=20, batch=1, seed=0):
    shapes = [(batch, length, n, 8) for n in (2, 1, 1)]
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype("float32") for shape in shapes]


def build(name="favorpp"):
    return h.build(name, kv_heads=1, head_dim=8, num_features=16)


def fused(feature_map, tokens, mask):
    """Attention by the kernels, in blocks of 16 tokens."""
    options = Options(implementation="pallas", block_size=16)
    return attend(*tokens, feature_map, mask, options=options)


def wanted(feature_map, tokens, mask):
    """The same by all pairs of tokens."""
    query, key, value = tokens
    side = feature_map.default_scale(8) ** 0.5
    stats = feature_map.statistics(query * side, key * side, None, mask.key_mask, True)
    features = (
        feature_map.query_features(query * side, stats),
        feature_map.key_features(key * side, stats),
    )
    return quadratic(*features, value, mask.key_mask, mask.causal)


def interpreted(function, *arguments):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu

    params = tpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    with tpu.force_tpu_interpret_mode(params):
        found = function(*arguments)
    assert not interpret_pallas_call.races.races_found
    return found


@on_jax
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "causal"), [("favorpp_learned", True), ("favorpp", False)]
)
def test_outputs_and_gradients(name, causal):
    import jax

    feature_map, tokens = build(name), arrays()
    visible = np.ones((1, 20), bool)
    visible[0, [0, 1, 9, 18]] = False
    # Its statistics come from the sequence where attention is not causal.
    mask = AttentionMask(visible, causal=causal)
    weight = np.random.default_rng(1).normal(size=tokens[0].shape)

    def loss(attention, tokens):
        return ops.sum(attention(feature_map, tokens, mask) * weight.astype("float32"))

    def both(attention):
        return jax.value_and_grad(lambda x: loss(attention, x))(tokens)

    found, gradients = interpreted(both, fused)
    expected, others = both(wanted)
    h.assert_close(found, expected, 1e-5)
    for x, y in zip(gradients, others, strict=True):
        h.assert_close(x, y, 1e-5)


@on_jax
@pytest.mark.long
@pytest.mark.parametrize("name", ["favorplus", "favorpp_dense"])
def test_every_map_and_what_is_not_finite(name):
    feature_map, tokens = build(name), arrays(batch=2)
    tokens[2][0, 5] = np.nan
    tokens[1][1, 7] = np.inf
    mask = AttentionMask(causal=True)
    found = h.to_numpy(interpreted(fused, feature_map, tokens, mask))
    spoiled = np.isnan(found).any(axis=(2, 3))
    assert np.array_equal(spoiled, np.arange(20) >= np.array([[5], [7]]))
    expected = h.to_numpy(wanted(feature_map, tokens, mask))
    for row, last in ((0, 5), (1, 7)):
        h.assert_close(found[row, :last], expected[row, :last], 1e-5)


@on_jax
@pytest.mark.long
def test_a_key_far_above_all_before_it():
    feature_map, tokens = build("favorplus"), arrays()
    # Exponents of hundreds, in the middle of a block: more than its product can hold.
    tokens[1][0, 6] *= 60
    mask = AttentionMask(causal=True)
    found = interpreted(fused, feature_map, tokens, mask)
    h.assert_close(found, wanted(feature_map, tokens, mask), 1e-4)


@on_jax
@pytest.mark.long
def test_the_future_changes_nothing():
    feature_map, mask = build(), AttentionMask(causal=True)
    tokens = arrays()
    expected = h.to_numpy(interpreted(fused, feature_map, tokens, mask))
    changed = [np.concatenate([x[:, :11], 9 * x[:, 11:]], axis=1) for x in tokens]
    found = h.to_numpy(interpreted(fused, feature_map, changed, mask))
    assert np.array_equal(found[:, :11], expected[:, :11])
    assert not np.array_equal(found[:, 11:], expected[:, 11:])


def model():
    inputs = keras.Input((8, 16))
    layer = keras.layers.MultiHeadAttention(2, 8)
    return keras.Model(inputs, layer(inputs, inputs))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"window": 4}, "they have no windows"),
        ({"feature_map": "elu"}, "features of 'elu' are not exponentials"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(arguments, reason):
    if keras.backend.backend() != "jax":
        reason = f"they run on JAX, not on {keras.backend.backend()}"
    softmax = model()
    arguments = {"feature_map": "favorpp", **arguments}
    with pytest.raises(ValueError, match=reason):
        keras_rfattn.replace_attention(softmax, implementation="pallas", **arguments)
    assert not keras_rfattn.describe_attention(softmax).replaced


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="`implementation` must be one of"):
        Options(implementation="triton")


def test_the_report_tells_what_computes():
    linear = keras_rfattn.replace_attention(model(), "favorpp", num_features=8, seed=0)
    text = str(keras_rfattn.describe_attention(linear))
    assert "computed by xla (" in text
    if keras.backend.backend() == "jax":
        assert "not timed on a TPU yet" in text
        keras_rfattn.restore_attention(linear)
        keras_rfattn.replace_attention(
            linear, "favorpp", num_features=8, seed=0, implementation="pallas"
        )
        assert "computed by pallas as asked" in str(
            keras_rfattn.describe_attention(linear)
        )
