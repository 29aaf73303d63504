"""`select_heads`: scores, what can be done with them, and what is refused."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.uptraining import HeadSelection, gates, recall_rows
from keras_rfattn.uptraining.batches import Batches
from keras_rfattn.uptraining.gates import OTHERS, GatedModel
from keras_rfattn.uptraining.uptrain import Stage
from keras_rfattn.uptraining.weights import Teacher, only_training
from tests import helpers as h
from tests.marks import ONE_BACKEND
from tests.uptraining import models as m

FEATURES = {"num_features": 8}


def select(model, data=None, **arguments):
    arguments = {"verbose": 0, "batch_size": 16, "share": 0.25} | arguments
    data = m.tokens() if data is None else data
    return keras_rfattn.select_heads(model, data, **arguments)


def without_output(model, layer, head):
    """Makes one head of a layer useless: its rows of the output projection are 0."""
    kernel = model.get_layer(layer)._output_dense.kernel
    value = h.to_numpy(kernel).copy()
    value[head] = 0
    kernel.assign(value)


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=ONE_BACKEND)])
def test_a_head_without_output_has_no_score(causal):
    model = m.linear_model("favorplus", causal=causal, **FEATURES)
    for layer, head in (("attention_0", 0), ("attention_1", 1)):
        without_output(model, layer, head)
    before = m.weights(model)
    output = h.to_numpy(model(m.tokens()))
    selection = select(model)
    scores = selection.scores
    assert list(scores) == ["attention_0", "attention_1"]
    assert scores["attention_0"][0] == scores["attention_1"][1] == 0
    others = scores["attention_0"][1], scores["attention_1"][0]
    assert all(x != 0 for x in others) and max(others) > 20
    assert selection.heads == (
        {"attention_0": [1]} if others[0] > others[1] else {"attention_1": [0]}
    )
    for weight, value in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    np.testing.assert_array_equal(h.to_numpy(model(m.tokens())), output)
    assert model.trainable_variables


@pytest.mark.parametrize(
    "other",
    ["linear", *(pytest.param(x, marks=ONE_BACKEND) for x in ("window", "zero"))],
)
def test_scores_add_up_to_what_softmax_removes_from_the_loss(other, monkeypatch):
    # Integrated gradients are complete: their sum is the difference of the ends.
    openings = (np.arange(16) + 0.5) / 16
    monkeypatch.setattr(gates, "OPENINGS", openings)
    model = m.linear_model("favorplus", window=4, **FEATURES)
    layers = [model.get_layer(f"attention_{i}") for i in range(2)]
    batches, stage = Batches(m.tokens(), 64, 0), Stage("features")
    teacher = Teacher(model, layers, [])
    gated = GatedModel(teacher, stage, batches.weighted(0), OTHERS[other])
    with only_training(model, []):
        scores = gated.scores(batches, 1, verbose=0)
    recorders = [(layer, OTHERS[other]) for layer in layers]
    _, loss = gated.measured(gated.compared(batches.weighted(0), recorders))
    h.assert_close(scores.sum(), h.to_numpy(loss), 0.02)


@pytest.mark.parametrize(
    "dtype", ["mixed_float16", pytest.param("mixed_bfloat16", marks=ONE_BACKEND)]
)
def test_mixed_precision_has_the_scores_of_float32(dtype):
    scores = []
    for policy in ("float32", dtype):
        model = m.linear_model("favorplus", dtype=policy, **FEATURES)
        for i in range(2):
            # Attention of so little effect has gradients too small for float16.
            kernel = model.get_layer(f"attention_{i}")._output_dense.kernel
            kernel.assign(0.005 * kernel)
        selection = select(model, m.tokens(256), batch_size=256, steps=1)
        scores.append(np.array(list(selection.scores.values())))
    np.testing.assert_allclose(*scores, atol=1.0)
    assert np.min(scores) > 5


@pytest.mark.once
def test_weights_of_tokens_choose_what_is_compared():
    model = m.linear_model("favorplus", causal=True, **FEATURES)
    rows = m.tokens()
    last = np.zeros(rows.shape, "float32")
    last[:, 8] = 1
    whole, some = select(model), select(model, (rows, None, last))
    ones = select(model, (rows, None, np.ones(rows.shape, "float32")))
    for path, scores in whole.scores.items():
        h.assert_close(np.array(ones.scores[path]), np.array(scores))
    assert not np.allclose(list(whole.scores.values()), list(some.scores.values()))
    both = select(model, answers=(rows, None, last), answers_weight=3.0)
    first, second, total = (
        np.array(list(x.scores.values())) for x in (whole, some, both)
    )
    expected = first + 3 * second
    h.assert_close(total, 100 * expected / np.maximum(expected, 0).sum(), 1e-4)
    h.assert_close(np.array(list(both.details["answers"].values())), second, 1e-5)


def test_a_selection_is_what_replacing_and_restoring_take():
    scores = {"attention_0": [40.0, 30.0], "attention_1": [10.0, 20.0]}
    data = m.tokens()
    for share, whole in ((0.25, []), (0.5, ["attention_0"]), (0.75, ["attention_0"])):
        selection = HeadSelection(scores, share)
        model = m.linear_model("favorplus", softmax_heads=selection, **FEATURES)
        other = m.linear_model("favorplus", **FEATURES)
        other.predict(data, verbose=0)  # compiled functions must be discarded
        keras_rfattn.restore_attention(other, include=selection)
        h.assert_close(other.predict(data, verbose=0), h.to_numpy(model(data)), 1e-5)
        for some in (model, other):
            report = keras_rfattn.describe_attention(some)
            assert [row.path for row in report.kept] == whole
            kept = {
                layer.path: list(layer.options.softmax_heads)
                for layer in map(some.get_layer, scores)
                if layer.path not in whole and layer.options.softmax_heads
            }
            assert kept == {k: x for k, x in selection.items() if k not in whole}
    softmax = m.softmax_model()
    difference = h.to_numpy(softmax(data)) - h.to_numpy(model(data))
    assert np.max(np.abs(difference)) > 1e-4


def test_scores_are_means_over_any_number_of_steps():
    # The first batches are kept, and those beyond them are read once.
    model = m.linear_model("favorplus", **FEATURES)
    batches = [m.tokens()[i : i + 8] for i in (0, 8)]
    few, many = (
        select(model, lambda: iter(batches * 4), steps=steps) for steps in (2, 8)
    )
    for name, scores in few.scores.items():
        h.assert_close(np.array(many.scores[name]), np.array(scores), 1e-4)
    one = select(model, lambda: iter(batches), steps=1)
    assert few.scores != one.scores


@pytest.mark.once
def test_heads_are_added_to_those_that_are_softmax():
    model = m.linear_model("favorplus", softmax_heads=[1], **FEATURES)
    keras_rfattn.restore_attention(model, include={"*_0": [1], "attention_1": [0]})
    assert model.get_layer("attention_0").options.softmax_heads == (1,)
    report = keras_rfattn.describe_attention(model)
    assert [row.path for row in report.kept] == ["attention_1"]
    selection = select(model)
    assert np.all(np.array(selection.scores["attention_0"]) != 0)


@pytest.mark.once
def test_a_selection_is_saved_and_prints(tmp_path):
    selection = select(m.linear_model("favorplus", **FEATURES))
    selection.save(tmp_path / "heads.json")
    loaded = HeadSelection.load(tmp_path / "heads.json")
    assert loaded == selection and vars(loaded) == vars(selection)
    assert loaded.with_share(0.5) != selection
    assert str(loaded).count("*") == 1 and "1 of 4 key/value heads" in str(loaded)
    assert "attention_1" in str(loaded)
    (tmp_path / "heads.json").write_text("[1]")
    with pytest.raises(ValueError, match="must be a file that `HeadSelection.save`"):
        HeadSelection.load(tmp_path / "heads.json")


@pytest.mark.once
def test_rows_of_recall_mark_their_answers():
    x, y, weight = recall_rows(lambda text: list(text.encode()), 600, 3, seed=1)
    assert y is None and weight.shape == x["token_ids"].shape == (3, 600)
    for row, marks, word in zip(
        x["token_ids"], weight, ("pass", "magic", "pass"), strict=True
    ):
        at = np.flatnonzero(marks)
        answer = bytes(row[at + 1].tolist()).decode()
        text = bytes(row[row > 0].tolist()).decode()
        assert answer.strip().isdigit() and text.endswith(answer) and word in text
        assert text.count(answer.strip()) >= 2
    other, _, _ = recall_rows(lambda text: list(text.encode()), 600, 3, seed=2)
    assert np.any(other["token_ids"] != x["token_ids"])


@pytest.mark.once
def test_details_of_recall_stand_at_all_depths():
    places = []
    for seed in range(12):
        x, _, marks = recall_rows(lambda text: list(text.encode()), 3000, 2, seed)
        for row, mark in zip(x["token_ids"], marks, strict=True):
            answer = bytes(row[np.flatnonzero(mark) + 1].tolist()).strip()
            places.append(bytes(row.tolist()).index(answer) / len(row))
    assert min(places) < 0.25 and max(places) > 0.75 and np.std(places) > 0.2


@pytest.mark.once
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"share": 1.0}, "`share` must be a number between 0 and 1"),
        ({"others": "none"}, "`others` must be one of"),
        ({"steps": 0}, "`steps` must be a positive integer"),
        ({"answers_weight": 0}, "`answers_weight` must be a positive number"),
        ({"data": []}, "`data` must be"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        select(m.linear_model("favorplus", **FEATURES), **arguments)


@pytest.mark.once
def test_refusals_of_models():
    with pytest.raises(ValueError, match="no linear attention"):
        select(m.softmax_model())
    with pytest.raises(TypeError, match="Keras model or layer"):
        select(None)
    model = m.softmax_model()
    with pytest.raises(ValueError, match="must leave at least one linear head"):
        keras_rfattn.replace_attention(model, softmax_heads={"*": [0, 1]})
    with pytest.raises(ValueError, match="matches none"):
        keras_rfattn.replace_attention(model, softmax_heads={"decoder": [0]})
    with pytest.raises(ValueError, match="from 0 to 1"):
        keras_rfattn.replace_attention(model, softmax_heads={"attention_0": [2]})
    assert not keras_rfattn.describe_attention(model).replaced
    assert keras.tree.flatten(model.get_config())
