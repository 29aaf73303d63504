"""WikiText-2 as characters; not a recipe itself."""

from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """Parts of a text as integers, and the number of different characters."""

    train: np.ndarray
    watched: np.ndarray
    test: np.ndarray
    vocabulary: int


def load(folder):
    """Loads `folder/wikitext2`: valid is for training, its last 10 % for validation.

    Characters that are not in the training text share the last integer.
    """
    text, test = (
        (folder / "wikitext2" / f"{part}.txt").read_text(encoding="utf-8")
        for part in ("valid", "test")
    )
    cut = int(0.9 * len(text))
    index = {c: i for i, c in enumerate(sorted(set(text[:cut])))}

    def encode(text):
        return np.array([index.get(c, len(index)) for c in text], dtype="int32")

    return Text(encode(text[:cut]), encode(text[cut:]), encode(test), len(index) + 1)


def pieces(text, count, length, generator):
    """Cuts pieces of a text from random places, `(count, length)`."""
    starts = generator.integers(0, text.size - length + 1, count)
    return text[starts[:, None] + np.arange(length)]
