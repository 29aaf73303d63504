"""Texts and pairs that test recall: what they ask can be answered from them."""

import functools
import re
import uuid

import numpy as np
import pytest

from keras_rfattn.diagnostics import recall

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
