"""Heads that stay softmax among linear ones."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention, attend
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.ops import AttentionMask, Options, softmax_attention
from keras_rfattn.uptraining.attention import layer_errors
from tests import helpers as h
from tests.marks import first, slow_on_jax
from tests.uptraining import models as m

MASKS = {
    "none": AttentionMask(self_attention=True),
    "padding": AttentionMask(h.padding_masks()["scattered"], self_attention=True),
    "causal": AttentionMask(causal=True, self_attention=True),
}
KEPT = [3, 0]


def answered(options, mask, name="favorplus", recorder=None):
    width = {"num_features": h.NUM_FEATURES} if name == "favorplus" else {}
    feature_map = h.build(name, **width)

    def function(query, key, value):
        return attend(
            query, key, value, feature_map, mask=mask, options=options,
            recorder=recorder,
        )  # fmt: skip

    return h.compiled(function)


def heads_of(x, kept):
    """Those that are softmax, or the others."""
    return ops.take(x, [i for i in range(h.HEADS) if (i in KEPT) == kept], axis=2)


@pytest.mark.parametrize(
    ("mask", "options"),
    first([("causal", {}), ("padding", {"window": 4}), ("none", {"temperature": 0.5})]),
)
def test_each_head_has_its_attention_and_gradient(mask, options):
    problem, mask = h.problem(), MASKS[mask]
    mixed = answered(Options(softmax_heads=KEPT, **options), mask)
    linear = answered(Options(**options), mask)

    def both(x):
        return ops.concatenate([heads_of(x, True), heads_of(x, False)], axis=2)

    def separate(query, key, value):
        groups = h.HEADS // h.KV_HEADS
        wide = [ops.repeat(x, groups, axis=2) for x in (key, value)]
        scaled = query * np.float32(h.HEAD_DIM**-0.5)
        softmax = softmax_attention(scaled, *wide, mask.key_mask, mask.causal)
        others = linear(query, key, value)
        return ops.concatenate([heads_of(softmax, True), heads_of(others, False)], 2)

    found = both(mixed(*problem))
    assert tuple(found.shape) == (h.BATCH, h.LENGTH, h.HEADS, h.VALUE_DIM)
    tensors = map(ops.convert_to_tensor, problem)
    h.assert_close(h.to_numpy(found), h.to_numpy(h.one_program(separate)(*tensors)))
    # The two kinds of heads are told apart.
    assert np.abs(h.to_numpy(both(linear(*problem)) - found)[:, :, :2]).max() > 0.1
    h.assert_gradients_close(
        h.gradients(lambda *x: both(mixed(*x)), *problem),
        h.gradients(separate, *problem),
        1e-4,
    )


def test_they_stay_softmax_under_every_control():
    problem, mask = h.problem(), MASKS["none"]
    softmax = answered(Options(), mask, recorder=Attention.softmax)
    expected = h.to_numpy(softmax(*problem))
    for answer in (Attention.zero, Attention.mean_of_values, Attention.window_alone):
        found = answered(Options(softmax_heads=KEPT), mask, recorder=answer)(*problem)
        control = answered(Options(), mask, recorder=answer)(*problem)
        h.assert_close(
            h.to_numpy(heads_of(found, True)), h.to_numpy(heads_of(expected, True))
        )
        np.testing.assert_array_equal(
            h.to_numpy(heads_of(found, False)), h.to_numpy(heads_of(control, False))
        )


@pytest.mark.parametrize("name", first(["favorplus", "polynomial"]))
def test_one_token_among_cached_keys(name):
    query, key, value = h.problem()
    options = Options(softmax_heads=KEPT)
    whole = answered(options, MASKS["causal"], name)(query, key, value)
    for position in (0, 5, h.LENGTH - 1):
        place = ops.convert_to_tensor(position, dtype="int32")
        mask = AttentionMask(causal=True, offset=place)
        one = query[:, position : position + 1]
        found = answered(options, mask, name)(one, key, value)
        expected = h.to_numpy(whole)[:, position : position + 1]
        h.assert_close(h.to_numpy(found), expected)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([4], "attention.*from 0 to 3. Received: softmax_heads=.4,"),
        ([0, 1, 2, 3], "Received: all 4 of .*attention"),
        ([1, 1], "distinct non-negative integers"),
        ([-1], "distinct non-negative integers"),
        (["a"], "distinct non-negative integers"),
        ([True], "distinct non-negative integers"),
        (2, "distinct non-negative integers"),
    ],
)
def test_bad_heads(heads, message):
    for make in (
        lambda: MultiHeadAttention(4, 8, softmax_heads=heads),
        lambda: GroupedQueryAttention(8, 4, 2, softmax_heads=heads),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    problem = h.problem()
    with pytest.raises(ValueError, match=message.replace("attention", "queries")):
        answered(Options(softmax_heads=heads), MASKS["none"])(*problem)


def replaced(softmax_heads=None, **kwargs):
    model = m.softmax_model()
    return keras_rfattn.replace_attention(
        model, "favorpp", num_features=8, seed=0, softmax_heads=softmax_heads, **kwargs
    )


def test_replaced_saved_and_restored(tmp_path):
    data, softmax = m.tokens(), m.softmax_model()
    expected = softmax.predict(data, verbose=0)
    model = replaced({"attention_1": [1], "*": np.array([0])})
    first, second = linear_layers(model)
    assert (first.options.softmax_heads, second.options.softmax_heads) == ((0,), (1,))
    report = keras_rfattn.describe_attention(model)
    assert "softmax in heads 1 of 2" in report.rows[1].note
    plain = keras_rfattn.describe_attention(replaced())
    assert report.rows[0].crossover == pytest.approx(2 * plain.rows[0].crossover, abs=1)
    found = model.predict(data, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(data, verbose=0), found)
    clone = keras.models.clone_model(model)
    assert linear_layers(clone)[1].options.softmax_heads == (1,)
    model.save_weights(tmp_path / "one.weights.h5")
    with pytest.raises(ValueError, match="saved with another mechanism"):
        replaced().load_weights(tmp_path / "one.weights.h5")
    np.testing.assert_array_equal(
        keras_rfattn.restore_attention(model).predict(data, verbose=0), expected
    )


def test_what_none_keeps_is_saved_as_before():
    assert "softmax_heads" not in linear_layers(replaced())[0].get_config()
    assert linear_layers(replaced({"*_1": [0]}))[1].get_config()["softmax_heads"] == [0]


@pytest.mark.full
@pytest.mark.once
def test_uptraining_is_of_the_others():
    model = m.softmax_model()
    keras_rfattn.replace_attention(
        model, "hedgehog", seed=0, softmax_heads={"attention_0": [1]}
    )
    first, second = linear_layers(model)
    vectors = [w for w in first.feature_map.trainable_weights if w.shape[0] == 2]
    before = [h.to_numpy(w).copy() for w in vectors]
    report = m.uptrain(model, steps=8, stages="attention")
    assert [len(x.after) for x in report.layers] == [1, 2]
    assert 0 < report.after < report.before
    assert vectors
    for old, weight in zip(before, vectors, strict=True):
        new = h.to_numpy(weight)
        np.testing.assert_array_equal(new[1], old[1])
        assert np.abs(new[0] - old[0]).max() > 0


def test_errors_of_a_layer_are_of_the_others():
    query, key, value = h.problem(kv_heads=h.HEADS)
    feature_map = h.build("favorplus", kv_heads=h.HEADS, num_features=h.NUM_FEATURES)

    @h.one_program
    def both(*tokens):
        call = Attention(
            *tokens, MASKS["none"], h.HEAD_DIM**-0.5, feature_map,
            Options(softmax_heads=KEPT),
        )  # fmt: skip
        options = dataclasses.replace(call.options, softmax_heads=())
        dropped = ops.zeros((h.BATCH,), dtype="bool")
        calls = call, call.replace(options=options)
        return [layer_errors(x, x, dropped, 0.0, 512) for x in calls]

    found, every = both(*map(ops.convert_to_tensor, (query, key, value)))
    for name, x in found.items():
        x, expected = h.to_numpy(x), h.to_numpy(every[name])
        assert (x[:, KEPT] == 0).all()
        np.testing.assert_array_equal(x[:, [1, 2]], expected[:, [1, 2]])
        assert (expected[:, KEPT] > 0).all()


@slow_on_jax
def test_presets_and_names_of_maps(tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30, num_layers=2, num_heads=2, hidden_dim=16,
        intermediate_dim=16, max_sequence_length=16,
    )  # fmt: skip
    model = keras_rfattn.replace_attention(
        backbone, "favorplus", num_features=8, seed=0,
        softmax_heads={"*layer_1*": [0]},
    )  # fmt: skip
    assert [x.options.softmax_heads for x in linear_layers(model)] == [(), (0,)]
    model.save_to_preset(tmp_path / "linear")
    again = keras_hub.models.BertBackbone.from_preset(str(tmp_path / "linear"))
    assert [x.options.softmax_heads for x in linear_layers(again)] == [(), (0,)]
    feature_map = linear_layers(again)[1].feature_map
    assert feature_maps.name_of(feature_map) == "favorplus"
