"""WikiText-2 as characters, and small models of them; not a recipe itself."""

import math
from typing import NamedTuple

import keras_hub
import numpy as np
from keras import ops


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


def prepare(model, width, embedding, context):
    """Fits a new KerasHub model of characters to its small size, in place.

    Its initializers assume a width of 768. Positions become sinusoids that are not
    trained, because a table would learn only from the few tokens near each row. The
    longest sinusoid has a wavelength of `context` tokens.
    """
    for weight in model.trainable_weights:
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign((768 / width) ** 0.5 * weight)
    length = embedding.position_embeddings.shape[0]
    waves = keras_hub.layers.SinePositionEncoding(context / (2 * math.pi))
    embedding.position_embeddings.assign(0.1 * waves(ops.zeros((1, length, width)))[0])
    embedding.trainable = False
