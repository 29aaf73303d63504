"""Texts that test recall can be answered from them, and scores are those of logits."""

import re
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest

from keras_rfattn.uptraining.recall import needle, passkey
from recipes.common import recall

ESSAY = " ".join(f"Essay number {i} has a sentence of its own." for i in range(40))
TESTS = {
    "passkey": (passkey, {}, r"The pass key is (\d{5})\. Remember"),
    "needle 1": (needle, {}, r"magic numbers for [a-z-]+ is: (\d{7})\."),
    "needle 2": (needle, {"text": ESSAY}, r"magic numbers for [a-z-]+ is: (\d{7})\."),
}


def characters(text):
    return [ord(x) for x in text]


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.mark.once
@pytest.mark.parametrize("name", TESTS)
def test_answers_are_in_prompts_that_fill_the_length(name):
    make, options, pattern = TESTS[name]
    examples = make(characters, 1500, [0, 0.5, 1], seed=1, **options)
    places = []
    for prompt, answer in examples:
        found = re.search(pattern, text_of(prompt))
        assert text_of(answer) == f" {found[1]}"
        # No sentence is longer than this.
        assert 1500 - 110 < len(prompt) + len(answer) <= 1500
        places.append(found.start() / len(prompt))
    assert places[0] < 0.3 < places[1] < 0.7 < places[2]
    assert len({text_of(answer) for _, answer in examples}) == 3
    again = make(characters, 1500, [0, 0.5, 1], seed=1, **options)
    assert text_of(again[2][0]) == text_of(examples[2][0])
    with pytest.raises(ValueError, match="`length` must be at least"):
        make(characters, 100, [0], **options)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        130, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=16,
        max_sequence_length=64,
    )  # fmt: skip
    # Logits that are far from uniform, and generation that does not repeat one token.
    generator = np.random.default_rng(0)
    for layer, scale in (
        (backbone.token_embedding, 0.5), (backbone.position_embedding, 2)
    ):  # fmt: skip
        (weight,) = layer.trainable_weights
        weight.assign(generator.normal(0, scale, weight.shape))
    return keras_hub.models.GPT2CausalLM(backbone)


def log_probs(model, ids):
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    logits = keras.ops.convert_to_numpy(model(inputs)).astype("float64")
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


@pytest.mark.parametrize("chunk", [7, 512])
def test_scores_are_those_of_logits(model, chunk, monkeypatch):
    monkeypatch.setattr(recall, "CHUNK", chunk)
    ids = np.random.default_rng(0).integers(0, 130, (2, 40)).astype("int32")
    logits = log_probs(model, ids)[:, 4:-1]
    expected = np.take_along_axis(logits, ids[:, 5:, None], axis=2)[..., 0]
    assert expected.std() > 0.5
    found, is_right = recall.score(model, ids, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(is_right, logits.argmax(-1) == ids[:, 5:])


class Tokenizer:
    def detokenize(self, ids):
        return " " + " ".join(str(x) for x in np.array(ids))


@pytest.mark.once
def test_an_answer_is_right_if_generation_writes_it(model, monkeypatch):
    monkeypatch.setattr(model, "preprocessor", SimpleNamespace(tokenizer=Tokenizer()))
    prompt = ids = np.arange(10, dtype="int32")
    for _ in range(3):
        likely = log_probs(model, ids[None])[0, -1].argmax()
        ids = np.append(ids, likely).astype("int32")
    first, second, third = ids[10:]
    assert first != second != third
    right = prompt, np.array([first, second])
    late = prompt, np.array([second, third])
    wrong = prompt, np.array([first, (second + 1) % 130])
    result = recall.evaluate(model, [right, wrong, late, right])
    assert result["exact"] == 0.5
    assert result["accuracy"] == 0.75
    assert result["log_likelihood"] < recall.evaluate(model, [right])["log_likelihood"]
    assert model.preprocessor is not None


@pytest.mark.once
def test_perplexity(model):
    rows = np.random.default_rng(1).integers(0, 130, (3, 30)).astype("int32")
    logits = log_probs(model, rows)[:, :-1]
    expected = np.take_along_axis(logits, rows[:, 1:, None], axis=2)[..., 0]
    found = recall.perplexity(model, rows, [(0, 1), (1, 8), (8, 50), (50, 60)])
    assert [*found] == [(1, 8), (8, 30)]
    by_hand = [np.exp(-expected[:, :7].mean()), np.exp(-expected[:, 7:].mean())]
    np.testing.assert_allclose([*found.values()], by_hand, rtol=1e-4)
    assert abs(by_hand[0] / by_hand[1] - 1) > 0.01
