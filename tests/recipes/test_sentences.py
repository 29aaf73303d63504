"""Texts of an evaluation are not trained on."""

import pytest

from recipes.common import sentences

pytestmark = pytest.mark.once


def test_texts_of_an_evaluation_are_dropped_and_counted(capsys):
    texts = ["A man sings.", "a  man SINGS", "Two men sing.", "“A man” sings!"]
    kept = sentences.without_texts(texts, ["a man, sings"])
    assert kept == ["Two men sing."]
    assert "3 texts dropped" in capsys.readouterr().out


def test_comparable_texts():
    comparable = sentences.comparable
    assert comparable("  Héllo,\tWORLD ½ ") == comparable("héllo world 1⁄2")
    assert comparable("a-b") == "a b"
    assert comparable("no") != comparable("not")
    # Vowels that are marks.
    assert comparable("की") != comparable("का")
