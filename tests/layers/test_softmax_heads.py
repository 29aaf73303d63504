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
from keras_rfattn.models import Plan
from keras_rfattn.ops import AttentionMask, Options, Softmax
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.uptraining.attention import layer_errors
from tests import helpers as h
from tests.marks import first, slow_on_jax
from tests.uptraining import models as m

MASKS = {
    "none": AttentionMask(self_attention=True),
    "padding": AttentionMask(h.padding_masks()["scattered"], self_attention=True),
    "causal": AttentionMask(causal=True, self_attention=True),
}
# Key/value heads, by the number of them. The query heads that read them follow.
KEPT = {2: [1], 4: [3, 0]}


def answered(
    options, mask, name="favorplus", recorder=None, kv_heads=h.KV_HEADS, sinks=None
):
    width = {"num_features": h.NUM_FEATURES} if name == "favorplus" else {}
    feature_map = h.build(name, kv_heads=kv_heads, **width)

    def function(query, key, value):
        return attend(
            query, key, value, feature_map, mask=mask, options=options,
            recorder=recorder, sink_logits=sinks,
        )  # fmt: skip

    return h.compiled(function)


def query_heads(kept, kv_heads=h.KV_HEADS):
    """Those that are softmax, or the others."""
    groups = h.HEADS // kv_heads
    return [i for i in range(h.HEADS) if (i // groups in KEPT[kv_heads]) == kept]


def heads_of(x, kept, kv_heads=h.KV_HEADS):
    return ops.take(x, query_heads(kept, kv_heads), axis=2)


@pytest.mark.parametrize(
    ("kv_heads", "mask", "options"),
    first([
        (2, "causal", {}), (4, "causal", {}), (4, "padding", {"window": 4}),
        (2, "none", {"temperature": 0.5}),
    ]),
)  # fmt: skip
def test_each_head_has_its_attention_and_gradient(kv_heads, mask, options):
    problem, mask = h.problem(kv_heads=kv_heads), MASKS[mask]
    kept = Options(softmax_heads=KEPT[kv_heads], **options)
    mixed = answered(kept, mask, kv_heads=kv_heads)
    linear = answered(Options(**options), mask, kv_heads=kv_heads)

    def both(x):
        parts = [heads_of(x, kept, kv_heads) for kept in (True, False)]
        return ops.concatenate(parts, axis=2)

    def separate(query, key, value):
        groups = h.HEADS // kv_heads
        wide = [ops.repeat(x, groups, axis=2) for x in (key, value)]
        scaled = query * np.float32(h.HEAD_DIM**-0.5)
        softmax = exact_attention(scaled, *wide, Softmax(), mask.key_mask, mask.causal)
        softmax = heads_of(softmax, True, kv_heads)
        others = heads_of(linear(query, key, value), False, kv_heads)
        return ops.concatenate([softmax, others], 2)

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


@pytest.mark.parametrize("sinks", [None, np.float32([0, 1, 2, 3])])
def test_they_stay_softmax_under_every_control(sinks):
    problem, mask = h.problem(), MASKS["none"]
    softmax = answered(Options(), mask, recorder=Attention.softmax, sinks=sinks)
    expected = h.to_numpy(softmax(*problem))
    for answer in (Attention.zero, Attention.mean_of_values, Attention.window_alone):
        options = Options(softmax_heads=KEPT[h.KV_HEADS])
        found = answered(options, mask, recorder=answer, sinks=sinks)(*problem)
        control = answered(Options(), mask, recorder=answer, sinks=sinks)(*problem)
        h.assert_close(
            h.to_numpy(heads_of(found, True)), h.to_numpy(heads_of(expected, True))
        )
        np.testing.assert_array_equal(
            h.to_numpy(heads_of(found, False)), h.to_numpy(heads_of(control, False))
        )


@pytest.mark.parametrize("name", first(["favorplus", "polynomial"]))
def test_one_token_among_cached_keys(name):
    query, key, value = h.problem()
    options = Options(softmax_heads=KEPT[h.KV_HEADS])
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
        ([2], "heads of .*attention.*from 0 to 1. Received: softmax_heads=.2,"),
        ([0, 1], "Received: all 2 key/value heads of .*attention"),
        ([1, 1], "distinct non-negative integers"),
        ([-1], "distinct non-negative integers"),
        (["a"], "distinct non-negative integers"),
        ([True], "distinct non-negative integers"),
        (2, "distinct non-negative integers"),
        ({"a": [0]}, "Use a `keras_rfattn.models.Plan` with `Options`"),
    ],
)
def test_bad_heads(heads, message):
    for make in (
        lambda: MultiHeadAttention(2, 8, softmax_heads=heads),
        lambda: GroupedQueryAttention(8, 4, 2, softmax_heads=heads),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    problem = h.problem()
    with pytest.raises(ValueError, match=message.replace("attention", "keys")):
        answered(Options(softmax_heads=heads), MASKS["none"])(*problem)


def replaced(**softmax_heads):
    """A model with softmax heads of layers by their names."""
    heads = {name: Options(softmax_heads=x) for name, x in softmax_heads.items()}
    plan = Plan({**heads, "*": "favorpp"})
    return keras_rfattn.replace_attention(
        m.softmax_model(), plan, num_features=8, seed=0
    )


def test_replaced_saved_and_restored(tmp_path):
    data, softmax = m.tokens(), m.softmax_model()
    expected = softmax.predict(data, verbose=0)
    model = replaced(attention_1=[1], attention_0=np.array([0]))
    first, second = linear_layers(model)
    assert (first.options.softmax_heads, second.options.softmax_heads) == ((0,), (1,))
    report = keras_rfattn.describe_attention(model)
    assert "1 of 2 key/value heads softmax (1)" in report.rows[1].note
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
    kept = linear_layers(replaced(attention_1=[0]))[1]
    assert kept.get_config()["softmax_heads"] == [0]


@pytest.mark.full
@pytest.mark.once
def test_uptraining_is_of_the_others():
    model = m.softmax_model()
    plan = Plan({"attention_0": Options(softmax_heads=[1]), "*": "hedgehog"})
    keras_rfattn.replace_attention(model, plan, seed=0)
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


@pytest.mark.parametrize("kv_heads", KEPT)
def test_errors_of_a_layer_are_of_the_others(kv_heads):
    query, key, value = h.problem(kv_heads=kv_heads)
    feature_map = h.build("favorplus", kv_heads=kv_heads, num_features=h.NUM_FEATURES)

    @h.one_program
    def both(*tokens):
        call = Attention(
            *tokens, MASKS["none"], h.HEAD_DIM**-0.5, feature_map,
            Options(softmax_heads=KEPT[kv_heads]),
        )  # fmt: skip
        options = dataclasses.replace(call.options, softmax_heads=())
        dropped = ops.zeros((h.BATCH,), dtype="bool")
        calls = call, call.replace(options=options)
        return [layer_errors(x, x, dropped, 0.0, 512) for x in calls]

    found, every = both(*map(ops.convert_to_tensor, (query, key, value)))
    found, every = map(h.to_numpy, (found, every))
    kept, others = (query_heads(is_kept, kv_heads) for is_kept in (True, False))
    assert (found[:, kept] == 0).all()
    np.testing.assert_array_equal(found[:, others], every[:, others])
    assert (every[:, kept] > 0).all()


@slow_on_jax
def test_presets_and_names_of_maps(tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30, num_layers=2, num_heads=2, hidden_dim=16,
        intermediate_dim=16, max_sequence_length=16,
    )  # fmt: skip
    plan = Plan({"*layer_1*": Options(softmax_heads=[0]), "*": "favorplus"})
    model = keras_rfattn.replace_attention(backbone, plan, num_features=8, seed=0)
    assert [x.options.softmax_heads for x in linear_layers(model)] == [(), (0,)]
    model.save_to_preset(tmp_path / "linear")
    again = keras_hub.models.BertBackbone.from_preset(str(tmp_path / "linear"))
    assert [x.options.softmax_heads for x in linear_layers(again)] == [(), (0,)]
    feature_map = linear_layers(again)[1].feature_map
    assert feature_maps.name_of(feature_map) == "favorplus"
