import functools
import re
import uuid

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

ESSAY = " ".join(f"Essay number {i} has a sentence of its own." for i in range(40))
NUMBER = r"special magic numbers for (?P<key>[a-z]+-[a-z]+) is: (?P<value>\d{7})\."
UUID = r"special magic uuids for (?P<key>[a-z]+-[a-z]+) is: (?P<value>[0-9a-f-]{36})\."


def characters(text):
    return [ord(x) for x in text]


class Words:
    """Tokens are words with the spaces before them, as in most vocabularies."""

    def __init__(self):
        self.known = []

    def encode(self, text):
        words = re.findall(r"\s*\w+|\s*[^\w\s]|\s+", text)
        self.known += [x for x in dict.fromkeys(words) if x not in self.known]
        return [self.known.index(x) for x in words]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)


def text_of(ids):
    return "".join(map(chr, ids))


TASKS = {
    "passkey": recall.passkey,
    "needle_1": recall.needle,
    "needle_2": functools.partial(recall.needle, kind=2, text=ESSAY),
    "needle_3": functools.partial(recall.needle, kind=3, text=ESSAY),
    "variables": functools.partial(recall.variable_tracking, num_chains=2, num_hops=3),
}
LENGTH = 1500
every_task = pytest.mark.parametrize("task", TASKS)
once = pytest.mark.once


def found_answer(task, prompt):
    """The answer that a reader of the prompt would give."""
    if task == "passkey":
        assert prompt.endswith("What is the pass key? The pass key is")
        return re.search(r"The pass key is (\d{5})\. Remember it", prompt).group(1)
    if task == "variables":
        value = re.search(r"variables are assigned the value (\d{5}), they", prompt)
        names, source = [], value.group(1)
        while match := re.search(rf"VAR ([A-Z]{{5}}) = {source}\b", prompt):
            names.append(match.group(1))
            source = f"VAR {names[-1]}"
        return " ".join(names)
    (match,) = re.finditer(UUID if task == "needle_3" else NUMBER, prompt)
    assert prompt.count(match["key"]) == 3
    assert re.search(rf"for {match['key']} mentioned in the provided text is$", prompt)
    return match["value"]


@once
@every_task
def test_answers_are_in_the_prompt(task):
    for example in TASKS[task](characters, LENGTH, num_examples=5):
        assert example.prompt.dtype == example.answer.dtype == "int32"
        answer = text_of(example.answer)
        assert answer == " " + found_answer(task, text_of(example.prompt))
    words = Words()
    example = TASKS[task](words, 300, num_examples=1)[0]
    answer = words.decode(example.answer)
    assert answer == " " + found_answer(task, words.decode(example.prompt))


@once
@every_task
@pytest.mark.parametrize("length", [LENGTH, 2001])
def test_examples_are_as_long_as_sentences_allow(task, length):
    sentence = len("Essay number 10 has a sentence of its own. ")
    if task in ("passkey", "needle_1", "variables"):
        sentence = len("The grass is green. The sky is blue. The sun is yellow. ")
        sentence += len("Here we go. There and back again. ")
    for example in TASKS[task](characters, length, num_examples=10):
        size = len(example.prompt) + len(example.answer)
        assert length - sentence < size <= length


@once
def test_tokens_of_several_words():
    known = {}

    def fours(text):
        words = re.findall(r"\s*\S+", text)
        groups = ["".join(words[i : i + 4]) for i in range(0, len(words), 4)]
        return [known.setdefault(x, len(known)) for x in groups]

    # A sentence has 19 words, so that alone it takes 5 tokens and in a text 4.75.
    prompt, answer = recall.passkey(fours, 505, num_examples=1)[0]
    assert 500 < len(prompt) + len(answer) <= 505
    with pytest.raises(ValueError, match="beginning of a text as it encodes the text"):
        recall.passkey(fours, 510, num_examples=1)


@once
@every_task
def test_seeds_decide(task):
    def texts(seed):
        examples = TASKS[task](characters, LENGTH, num_examples=3, seed=seed)
        return [text_of(np.concatenate(example)) for example in examples]

    assert texts(3) == texts(3)
    assert len({*texts(3), *texts(4)}) == 6


def depths(examples, pattern="special magic numbers for"):
    """Shares of the haystack's characters that precede the needle."""
    found = []
    for example in examples:
        _, context, _ = text_of(example.prompt).split("\n", maxsplit=2)
        found.append(context.index(pattern) / len(context))
    return np.array(found)


@once
def test_depths_are_spread():
    make = functools.partial(recall.needle, characters, 6000, kind=2, text=ESSAY)
    tolerance = 0.03
    even = depths(make(num_examples=5))
    np.testing.assert_allclose(even, [0, 0.25, 0.5, 0.75, 1], atol=tolerance)
    listed = depths(make(num_examples=3, depths=[0.9, 0.1]))
    np.testing.assert_allclose(listed, [0.9, 0.1, 0.9], atol=tolerance)
    drawn = np.sort(depths(make(num_examples=40, depths="random")))
    # The 0.1% quantile of the Kolmogorov-Smirnov statistic of 40 uniform numbers.
    assert np.abs(drawn - (np.arange(40) + 0.5) / 40).max() < 0.31 + tolerance
    assert len(set(np.round(drawn, 3))) > 20


@once
def test_assignments_are_hidden_in_order():
    for example in TASKS["variables"](characters, 3000, num_examples=10):
        prompt, names = text_of(example.prompt), text_of(example.answer).split()
        places = [prompt.index(f"VAR {name} = ") for name in names]
        assert places == sorted(places) and len(places) == 4
        assert len(re.findall("^VAR", prompt, re.MULTILINE)) == 8
        assert len(set(re.findall(r"VAR ([A-Z]{5}) =", prompt))) == 8


@once
def test_an_essay_begins_anywhere_and_is_repeated():
    short = "Alpha is first. Beta is second!\nGamma is third"
    examples = recall.needle(characters, 900, 2, short, num_examples=20, depths=[1])
    contexts = [text_of(x.prompt).split("\n")[1] for x in examples]
    assert {x.split()[0] for x in contexts} == {"Alpha", "Beta", "Gamma"}
    assert "Alpha is first. Beta is second! Gamma is third Alpha" in contexts[0]


@once
def test_the_third_needle_is_a_uuid():
    examples = TASKS["needle_3"](characters, LENGTH, num_examples=3)
    values = [uuid.UUID(text_of(x.answer).strip()) for x in examples]
    assert len(set(values)) == 3
    assert all(x.version == 4 and x.variant == uuid.RFC_4122 for x in values)


class Ids:
    def __init__(self, ids):
        self.ids = ids


class WithIds:
    def encode(self, text):
        return Ids(characters(text))


@once
@pytest.mark.parametrize("tokenizer", [WithIds(), lambda x: np.array(characters(x))])
def test_forms_of_tokenizers(tokenizer):
    found = recall.passkey(tokenizer, 700, num_examples=1)[0]
    wanted = recall.passkey(characters, 700, num_examples=1)[0]
    np.testing.assert_array_equal(found.prompt, wanted.prompt)


@once
def test_a_first_token_is_added_once():
    found = recall.passkey(lambda x: [1, *characters(x)], 701, num_examples=1)[0]
    wanted = recall.passkey(characters, 700, num_examples=1)[0]
    np.testing.assert_array_equal(found.prompt, [1, *wanted.prompt])
    np.testing.assert_array_equal(found.answer, wanted.answer)


NO_TOKENIZERS = {
    "ends": (lambda x: [*characters(x), 2], "adds no token at the end"),
    "pads": (lambda x: [*characters(x), *[0] * 5000][:5000], "neither pads"),
    "truncates": (lambda x: characters(x)[:600], "neither pads nor truncates"),
    "text": (lambda x: x.split(), "must return a list of integers"),
    "rows": (lambda x: [characters(x)], "must return a list of integers"),
    "no function": ("gpt2", "must be a function from a text"),
}


@once
@pytest.mark.parametrize("name", NO_TOKENIZERS)
def test_tokenizers_that_are_refused(name):
    tokenizer, message = NO_TOKENIZERS[name]
    with pytest.raises((TypeError, ValueError), match=f"`tokenizer`.*{message}"):
        recall.passkey(tokenizer, 1000, num_examples=2)


make_needle = functools.partial(recall.needle, characters, LENGTH)
WRONG_TEXTS = {
    "length: too short": (
        lambda: recall.passkey(characters, 100),
        r"`length` must be at least \d+.*Received: length=100\. Use",
    ),
    "length: none": (lambda: recall.passkey(characters, 0), "`length` must be a pos"),
    "num_examples": (lambda: make_needle(num_examples=0), "`num_examples` must be"),
    "kind": (lambda: make_needle(kind=4), "`kind` must be 1, 2 or 3.*kind=4"),
    "kind: name": (lambda: make_needle(kind="2"), "`kind` must be 1, 2 or 3"),
    "text: missing": (lambda: make_needle(kind=2), "`text` must be a non-empty string"),
    "text: empty": (
        lambda: make_needle(kind=3, text=" "),
        "`text` must be a non-empty",
    ),
    "text: unused": (
        lambda: make_needle(text="A."),
        "`text` must be `None` for kind 1",
    ),
    "seed": (lambda: make_needle(seed=-1), "`seed` must be a non-negative.*seed=-1"),
    "seed: none": (lambda: make_needle(seed=None), "`seed` must be a non-negative"),
    "depths": (lambda: make_needle(depths=[0.5, 1.5]), "`depths` must be"),
    "depths: name": (lambda: make_needle(depths="middle"), "`depths` must be"),
    "depths: none": (lambda: make_needle(depths=[]), "`depths` must be"),
    "num_hops": (
        lambda: recall.variable_tracking(characters, 900, num_hops=0),
        "`num_hops` must be a positive integer",
    ),
    "mqar: length": (lambda: recall.mqar(1, 15, 4, 64), "`length` must be at least 16"),
    "mqar: vocabulary_size": (
        lambda: recall.mqar(1, 16, 4, 9),
        "`vocabulary_size` must be at least 10",
    ),
    "mqar: power": (
        lambda: recall.mqar(1, 16, 4, 64, power=0),
        "`power` must be a pos",
    ),
    "mqar: seed": (lambda: recall.mqar(1, 16, 4, 64, seed=-1), "`seed` must be"),
    "mqar: num_pairs": (lambda: recall.mqar(1, 16, 0, 64), "`num_pairs` must be"),
}


@once
@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_arguments_that_are_refused(name):
    call, message = WRONG_TEXTS[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "Received: " in str(error.value)


@once
@pytest.mark.parametrize("shape", [(20, 64, 8, 50), (5, 16, 4, 10), (3, 37, 1, 4)])
def test_targets_of_pairs_by_a_slow_reference(shape):
    num_sequences, length, num_pairs, size = shape
    inputs, targets, weights = recall.mqar(*shape, seed=1)
    assert inputs.shape == targets.shape == weights.shape == (num_sequences, length)
    assert (inputs.dtype, targets.dtype, weights.dtype) == ("int32", "int32", "float32")
    first = 2 * num_pairs
    for row, target, weight in zip(inputs, targets, weights, strict=True):
        values = dict(zip(row[0:first:2], row[1:first:2], strict=True))
        assert len(values) == len(set(values.values())) == num_pairs
        assert all(0 < x < size // 2 for x in values)
        assert all(size // 2 <= x < size for x in values.values())
        wanted = [0] * first + [values.get(x, 0) for x in row[first:]]
        assert target.tolist() == wanted
        assert weight.tolist() == [float(x > 0) for x in wanted]
        places = np.flatnonzero(weight)
        assert sorted(row[places]) == sorted(values)
        assert not (places % 2).any()


@once
def test_seeds_of_pairs():
    one, same, other = (recall.mqar(4, 32, 4, 40, seed=s)[0] for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any(axis=1).all()


@once
@pytest.mark.parametrize("power", [0.01, 1.0])
def test_queries_stand_at_places_of_a_power_law(power):
    count, places = 4000, 10
    _, _, weights = recall.mqar(count, 2 * places + 2, 1, 8, seed=0, power=power)
    found = weights[:, 2::2].mean(axis=0)
    wanted = np.arange(1, places + 1) ** (power - 1)
    wanted /= wanted.sum()
    deviation = np.sqrt(wanted * (1 - wanted) / count)
    assert (np.abs(found - wanted) < 4 * deviation).all()
    assert found.sum() == pytest.approx(1)


WORDS = 60


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
    # Of the current token instead of the next.
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
