"""Scores of recall against references, of models whose logits are known."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.diagnostics import recall
from keras_rfattn.diagnostics.recall import scorer
from tests import helpers as h
from tests.marks import first_on_jax, slow_on_jax

WORDS = 60
once = pytest.mark.once


def one_hot(ids):
    return 9.0 * np.eye(WORDS)[ids]


def oracle(ids):
    """Logits of the token that follows, which a causal model would not know."""
    return one_hot(np.roll(h.to_numpy(ids), -1, axis=1))


def uniform(ids):
    return np.zeros((*ids.shape, WORDS))


def examples(lengths=(5, 17, 300, 9, 290), seed=0):
    generator = np.random.default_rng(seed)
    return [
        recall.Example(generator.integers(1, WORDS, n), generator.integers(1, WORDS, k))
        for n, k in zip(lengths, (1, 3, 2, 4, 1), strict=False)
    ]


TABLE = np.random.default_rng(5).normal(size=(WORDS, WORDS)).astype("float32")
LOG_TABLE = TABLE - np.log(np.exp(TABLE).sum(axis=1, keepdims=True))


def bigrams(ids):
    return TABLE[h.to_numpy(ids)]


def bigram_model():
    embedding = keras.layers.Embedding(WORDS, WORDS)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding])
    embedding.set_weights([TABLE])
    return model


def bigram_log_probs(example):
    row = np.concatenate(example)
    found = LOG_TABLE[row[:-1], row[1:]]
    return found[-len(example.answer) :]


def test_accuracy_of_oracles():
    tests = examples()
    assert recall.accuracy(oracle, tests, batch_size=2) == 1
    assert recall.accuracy(lambda ids: oracle(ids)[..., ::-1], tests) == 0
    # This model predicts the current token instead of the next.
    assert recall.accuracy(lambda ids: one_hot(h.to_numpy(ids)), tests) == 0


@once
def test_one_wrong_token_makes_an_answer_wrong():
    tests = examples()

    def wrong(example, place):
        answer = example.answer.copy()
        answer[place] = answer[place] % (WORDS - 1) + 1
        whole = np.concatenate(example)
        return whole, len(example.prompt) + place, answer[place]

    whole, place, token = wrong(tests[3], 2)

    def nearly(ids):
        logits, ids = oracle(ids), h.to_numpy(ids)
        for row, of_row in zip(ids, logits, strict=True):
            if (row[: len(whole)] == whole).all():
                of_row[place - 1] = 20 * np.eye(WORDS)[token]
        return logits

    assert recall.accuracy(nearly, tests) == 0.8


@pytest.mark.parametrize("model", [bigrams, bigram_model], ids=["function", "model"])
def test_log_likelihood_equals_a_reference(model):
    tests = examples()
    model = model() if model is bigram_model else model
    wanted = np.concatenate([bigram_log_probs(x) for x in tests]).mean()
    for size in (2, 8):
        found = recall.log_likelihood(model, tests, batch_size=size)
        assert found == pytest.approx(wanted, rel=1e-5)
    # The mean is over tokens, so that it differs from the mean over examples.
    assert wanted != pytest.approx(np.mean([bigram_log_probs(x).mean() for x in tests]))


@once
def test_few_shapes():
    shapes = []

    def recorded(ids):
        shapes.append(tuple(ids.shape))
        return bigrams(ids)

    tests = examples(range(1, 700, 140)) + examples(range(2, 600, 120))
    recall.accuracy(recorded, tests, batch_size=3)
    longest = max(len(np.concatenate(x)) for x in tests)
    assert longest not in (512, 768)
    assert set(shapes) == {(3, 256), (3, 512), (3, longest)}


def causal_lm(num_features=8):
    from tests.models import families

    keras.utils.set_random_seed(3)
    model, _ = families.llama()
    for weight in model.weights:
        weight.assign(4 * weight)
    return keras_rfattn.replace_attention(
        model, "favorplus", num_features=num_features, seed=0
    )


def whole_logits(model):
    forward = h.forward(model)
    return lambda ids: forward({"token_ids": ids, "padding_mask": ops.ones_like(ids)})


@slow_on_jax
def test_a_causal_lm_scores_like_its_own_logits():
    pytest.importorskip("keras_hub")
    model, tests = causal_lm(), examples((5, 11, 20))
    whole = whole_logits(model)
    wanted = recall.log_likelihood(whole, tests)
    assert wanted < -4
    assert recall.log_likelihood(model, tests) == pytest.approx(wanted, rel=1e-4)
    rows = np.random.default_rng(2).integers(0, WORDS, (3, 14))
    found = recall.perplexity_by_position(model, rows, (0, 5, 14), batch_size=2)
    wanted = recall.perplexity_by_position(whole, rows, (0, 5, 14))
    assert found == pytest.approx(wanted, rel=1e-4)


@once
def test_a_causal_lm_refuses_tokens_it_does_not_know():
    pytest.importorskip("keras_hub")
    with pytest.raises(ValueError, match=f"`model` must know all tokens.*{WORDS}"):
        recall.accuracy(causal_lm(), [([1], [WORDS])])


@slow_on_jax
def test_logits_of_one_chunk_at_a_time(monkeypatch):
    pytest.importorskip("keras_hub")
    monkeypatch.setattr(scorer, "CHUNK", 4)
    model, shapes = causal_lm(), []
    scores = scorer.Scorer(model)
    head = scores.head

    def recorded(x):
        shapes.append(tuple(x.shape))
        return head(x)

    scores.head = recorded
    ids = np.ones((2, 11), "int32")
    places = np.tile(np.arange(10), (2, 1))
    log_probs, is_right = scores(ids, ids, places, ids[:, 1:])
    assert log_probs.shape == is_right.shape == (2, 10)
    assert {x[:2] for x in shapes} == {(2, 4), (2, 2)}


@pytest.mark.parametrize("chunk", first_on_jax([512, 3]))
def test_perplexity_by_position(monkeypatch, chunk):
    monkeypatch.setattr(scorer, "CHUNK", chunk)
    rows = np.random.default_rng(1).integers(0, WORDS, (5, 23))

    found = recall.perplexity_by_position(uniform, rows, edges=(0, 4, 9, 30))
    assert found == pytest.approx({(0, 4): 60, (4, 9): 60, (9, 23): 60}, rel=1e-5)
    losses = -LOG_TABLE[rows[:, :-1], rows[:, 1:]]
    wanted = {
        (0, 4): np.exp(losses[:, :3].mean()),
        (4, 9): np.exp(losses[:, 3:8].mean()),
        (9, 23): np.exp(losses[:, 8:].mean()),
    }
    for size in (1, 2):
        found = recall.perplexity_by_position(
            bigrams, rows, edges=(0, 4, 9, 30), batch_size=size
        )
        assert found == pytest.approx(wanted, rel=1e-5)
    assert list(recall.perplexity_by_position(bigrams, rows)) == [(0, 23)]
    assert list(recall.perplexity_by_position(bigrams, rows, (0, 1, 5))) == [(1, 5)]


@slow_on_jax
def test_a_metric_sees_replaced_parts():
    model = keras_rfattn.models.transformer_pp(
        attention="favorplus", vocabulary_size=WORDS, num_layers=1, num_heads=2,
        head_dim=8, num_features=2, seed=0,
    )  # fmt: skip
    for weight in model.trainable_weights:
        weight.assign(2 * weight)
    tests = examples((5, 11, 20))
    metric = recall.metric(tests)
    found = diagnostics.sensitivity(model, None, metric, verbose=0)
    assert found.as_it_is == recall.log_likelihood(model, tests)
    assert abs(found.softmax - found.as_it_is) > 1e-4
    keras_rfattn.restore_attention(model)
    assert metric(model) == pytest.approx(found.softmax, rel=1e-4)


@once
def test_kinds_of_metrics():
    tests = examples()
    assert recall.metric(tests, kind="accuracy")(oracle) == 1
    found = recall.metric(tests)(bigrams, None)
    assert found == recall.log_likelihood(bigrams, tests)


@once
def test_comparisons():
    assert recall.win_and_tie_rate([1, 2, 3], [1, 3, 2]) == pytest.approx(2 / 3)
    assert recall.win_and_tie_rate([0, 0], [1, 1]) == 0
    assert recall.relative_score([1, 1], [2, 4]) == 0.375


class NoEmbedding(keras.Model):
    def __init__(self):
        super().__init__()
        self.backbone = keras.layers.Dense(2)

    def build(self, shape):
        self.built = True

    def call(self, x):
        return x


def no_embedding():
    model = NoEmbedding()
    model.build(None)
    return model


one = [recall.Example(np.array([1, 2]), np.array([3]))]
ROWS = np.ones((1, 5), int)
WRONG_SCORES = {
    "model": (lambda: recall.accuracy("gpt2", one), TypeError, "`model` must be a Ker"),
    "model: class": (lambda: recall.accuracy(keras.Model, one), TypeError, "`model`"),
    "model: no embedding": (
        lambda: recall.accuracy(no_embedding(), one),
        TypeError,
        "`model` must be a CausalLM whose backbone has",
    ),
    "model: no logits": (
        lambda: recall.accuracy(lambda ids: ids, one),
        ValueError,
        "`model` must return logits of shape",
    ),
    "model: last logits": (
        lambda: recall.accuracy(lambda ids: bigrams(ids)[:, -1:], one),
        ValueError,
        "`model` must return logits of shape",
    ),
    "tokens": (
        lambda: recall.accuracy(uniform, [([1], [WORDS])]),
        ValueError,
        f"`model` must know all tokens.*token {WORDS}",
    ),
    "examples: none": (lambda: recall.accuracy(oracle, []), ValueError, "`examples`"),
    "examples: no answer": (
        lambda: recall.metric([([1, 2], [])]),
        ValueError,
        "`examples` must be a non-empty list of pairs",
    ),
    "examples: one": (lambda: recall.metric(one[0]), ValueError, "`examples` must be"),
    "examples: text": (
        lambda: recall.metric([("a", "b")]),
        ValueError,
        "`examples` must be",
    ),
    "kind": (lambda: recall.metric(one, "f1"), ValueError, "`kind` must be one of"),
    "batch_size": (
        lambda: recall.metric(one, batch_size=0),
        ValueError,
        "`batch_size` must be a positive integer",
    ),
    "rows": (
        lambda: recall.perplexity_by_position(oracle, ROWS[0]),
        ValueError,
        r"`rows` must be non-negative integers of shape \(N, T\)",
    ),
    "rows: one token": (
        lambda: recall.perplexity_by_position(oracle, ROWS[:, :1]),
        ValueError,
        "`rows` must be",
    ),
    "edges": (
        lambda: recall.perplexity_by_position(oracle, ROWS, (0, 3, 2)),
        ValueError,
        "`edges` must be increasing",
    ),
    "edges: behind the rows": (
        lambda: recall.perplexity_by_position(oracle, ROWS, (5, 9)),
        ValueError,
        "`edges` must be increasing.*rows of 5 tokens",
    ),
    "edges: a number": (
        lambda: recall.perplexity_by_position(oracle, ROWS, 3),
        ValueError,
        "`edges` must be increasing",
    ),
    "scores: number": (
        lambda: recall.win_and_tie_rate([1], [1, 2]),
        ValueError,
        "`scores_a` and `scores_b` must be non-empty",
    ),
    "scores: not finite": (
        lambda: recall.win_and_tie_rate([float("nan")], [1]),
        ValueError,
        "`scores_a` and `scores_b` must be finite",
    ),
    "scores: zero": (
        lambda: recall.relative_score([1], [0]),
        ValueError,
        "`scores_b` must be positive.*Use `win_and_tie_rate`",
    ),
}


@once
@pytest.mark.parametrize("name", WRONG_SCORES)
def test_scores_that_are_refused(name):
    call, kind, message = WRONG_SCORES[name]
    with pytest.raises(kind, match=message) as error:
        call()
    assert "Received: " in str(error.value)
