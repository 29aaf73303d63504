"""Hides statements among sentences, so that a text has a given number of tokens."""

import functools
from typing import NamedTuple

import numpy as np

ADVICE = (
    "Use a tokenizer that neither pads nor truncates, and that adds no token at the "
    "end."
)


class Form(NamedTuple):
    """A text that hides statements and asks about them.

    Attributes:
        before: Text before the haystack.
        statements: List of the statements to hide.
        depths: Increasing numbers from 0 to 1, the share of the haystack that precedes
            each statement.
        after: Text after the haystack, up to the answer.
        answer: Text of the answer.
    """

    before: str
    statements: list
    depths: list
    after: str
    answer: str

    def prompt(self, sentences, joint):
        """Returns the text up to the answer, with a given haystack."""
        found = list(sentences)
        pairs = zip(self.statements, self.depths, strict=True)
        # Backwards, so that each index still counts the haystack's sentences only.
        for statement, depth in reversed(list(pairs)):
            found.insert(round(depth * len(sentences)), statement)
        return self.before + joint.join(found) + self.after


class Haystack:
    """Sentences that are repeated as often as a text needs.

    Args:
        sentences: Non-empty list of sentences.
        joint: Text between two sentences.
        encode: A function that `encoder` returns.
    """

    def __init__(self, sentences, joint, encode):
        self.sentences, self.joint, self.encode = sentences, joint, encode
        # Each sentence occurs in many examples.
        self.size = functools.cache(self._size)

    def ids(self, form, length, start=0):
        """Returns `(prompt, answer)` of a form, with the largest haystack that fits.

        Args:
            form: A `Form`.
            length: Largest number of tokens of prompt and answer together.
            start: Index of the sentence with which the haystack begins.

        Raises:
            ValueError: If `length` leaves no room for a sentence, or if the tokenizer
                does not encode the beginning of a text as it encodes the text.
        """

        def size(count):
            return len(self.encode(self._prompt(form, count, start) + form.answer))

        _check_growth(size(0), size(1))
        count = self._estimate(length - size(0), start)
        while count > 0 and size(count) > length:
            count -= 1
        while (larger := size(count + 1)) <= length:
            _check_growth(size(count), larger)
            count += 1
        if count == 0:
            raise ValueError(
                f"`length` must be at least {size(1)}, the number of tokens of the "
                f"question, its answer and one sentence. Received: length={length}. "
                "Use a larger `length`, or a haystack of shorter sentences."
            )
        prompt = self._prompt(form, count, start)
        return _divided(self.encode(prompt), self.encode(prompt + form.answer))

    def _prompt(self, form, count, start):
        total = len(self.sentences)
        sentences = [self.sentences[(start + i) % total] for i in range(count)]
        return form.prompt(sentences, self.joint)

    def _estimate(self, room, start):
        """Returns about how many sentences have `room` tokens."""
        count = 0
        while room > 0:
            room -= self.size((start + count) % len(self.sentences))
            count += 1
        return count

    def _size(self, index):
        """Returns the number of tokens that a sentence adds to a text."""
        sentence = self.sentences[index]
        once = len(self.encode(sentence))
        twice = len(self.encode(sentence + self.joint + sentence))
        _check_growth(once, twice)
        return twice - once


def _check_growth(shorter, longer):
    """Raises `ValueError` unless a text with one more sentence has more tokens."""
    if longer <= shorter:
        raise ValueError(
            "`tokenizer` must encode a longer text as more tokens. Received: "
            f"{shorter} tokens for a text, and {longer} with one more sentence. "
            f"{ADVICE}"
        )


def _divided(prompt, whole):
    """Returns `(prompt, answer)` of the tokens of both together."""
    if len(whole) <= len(prompt) or (whole[: len(prompt)] != prompt).any():
        raise ValueError(
            "`tokenizer` must encode the beginning of a text as it encodes the text. "
            f"Received: a prompt of {len(prompt)} tokens, with which the "
            f"{len(whole)} tokens of prompt and answer do not begin. {ADVICE}"
        )
    return prompt, whole[len(prompt) :]


def encoder(tokenizer):
    """Returns a function from a text to an int32 array of its tokens.

    Raises:
        TypeError: If `tokenizer` is not callable and has no method `encode`. The
            function raises it if the tokenizer returns no integers.
    """
    encode = getattr(tokenizer, "encode", tokenizer)
    # A string has a method `encode` too.
    if isinstance(tokenizer, str) or not callable(encode):
        raise TypeError(
            "`tokenizer` must be a function from a text to a list of integers, or an "
            "object with such a method `encode`. Received: "
            f"tokenizer={tokenizer!r:.80} of type {type(tokenizer).__name__}."
        )

    def ids(text):
        result = encode(text)
        found = np.asarray(getattr(result, "ids", result))
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise TypeError(
                "`tokenizer` must return a list of integers. Received: "
                f"{result!r:.80} of type {type(result).__name__} for the text "
                f"{text!r:.40}."
            )
        return found.astype("int32")

    return ids
