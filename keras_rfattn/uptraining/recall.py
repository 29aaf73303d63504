"""Rows of tokens that state a detail early and ask for it at the end: `recall_rows`.

A row hides a detail among sentences that fill a text to a number of tokens, and asks
for it at the end: a pass key ("Landmark Attention", Mohtashami and Jaggi, 2023) or a
needle (RULER, Hsieh et al., 2024). An example is `(prompt, answer)`, two arrays of
tokens with at most `length` together. Its depth is the place of the detail, from 0 at
the beginning of the sentences to 1 at their end.
"""

import re
from collections.abc import Callable

import numpy as np

from keras_rfattn.arguments import check_seed, check_sizes

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
    "back again."
)
PASSKEY_BEFORE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and "
    "memorize it. I will quiz you about the important information there.\n"
)
PASSKEY_AFTER = "\nWhat is the pass key? The pass key is"
NEEDLE_BEFORE = (
    "A special magic number is hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the number afterwards.\n"
)
NEEDLE_AFTER = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
# Keys of needles are an adjective and a noun.
ADJECTIVES = (
    "able big blue brave bright calm clean clever cold dark deep dry early fair fast "
    "fine fresh full grand great happy kind late long loud new old proud quick quiet "
    "round sharp short slow soft strong sweet tall warm wise"
).split()
NOUNS = (
    "apple basket bird boat book bridge butter camera candle castle chair city cloud "
    "coat door farm fish flower forest garden hammer horse house island king ladder "
    "lake lamp letter market mirror mountain ocean paper pencil river school ship "
    "table window"
).split()


def recall_rows(encode: Callable, length: int, count: int, seed: int = 0):
    """Makes rows that hide a pass key or a number, and mark the tokens that name it.

    Rows with a pass key, which is stated twice, and rows with a number for a key of
    two words alternate. The details stand at random places of a row. The rows are data
    for `select_heads(..., answers=...)` and for `uptrain`.

    Args:
        encode: A function from a text to its tokens, without special tokens, such as
            the `tokenizer` of a KerasHub preprocessor.
        length: Number of tokens of each row, padding on the right included.
        count: Number of rows.
        seed: Non-negative integer that chooses the details and their places.

    Returns:
        `(x, y, sample_weight)`. x is a dict of `token_ids` and `padding_mask`, both of
        shape `(count, length)`; y is `None`; `sample_weight`, of the same shape, is 1
        where the next token belongs to the answer, and 0 elsewhere.

    Raises:
        ValueError: If `length` or `count` is not a positive integer, or `length` is too
            short for a row.
    """
    check_sizes(length=length, count=count)
    check_seed(seed)

    def tokens(text):
        return np.asarray(encode(text)).tolist()

    depths = np.random.default_rng([seed, 1]).uniform(size=(2, -(-count // 2)))
    pairs = zip(
        passkey(tokens, length, depths[0], seed),
        needle(tokens, length, depths[1], seed),
        strict=True,
    )
    examples = [example for pair in pairs for example in pair][:count]
    token_ids, weight = np.zeros((2, count, length), "int32")
    mask = np.zeros((count, length), "int32")
    for row, (prompt, answer) in enumerate(examples):
        whole = np.concatenate([prompt, answer])
        token_ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
        weight[row, len(prompt) - 1 : len(whole) - 1] = 1
    x = {"token_ids": token_ids, "padding_mask": mask}
    return x, None, weight.astype("float32")


def passkey(encode, length, depths, seed=0):
    """Returns examples that hide a pass key of five digits among repeated sentences."""

    def hide(generator):
        key = generator.integers(10_000, 100_000)
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
        return PASSKEY_BEFORE, hidden, PASSKEY_AFTER, f" {key}"

    return _examples(hide, [NOISE], " ", encode, length, depths, seed)


def needle(encode, length, depths, seed=0, text=None):
    """Returns examples that hide a number of seven digits: S-NIAH-1, or 2 in a text."""

    def hide(generator):
        key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
        value = generator.integers(10**6, 10**7)
        hidden = f"One of the special magic numbers for {key} is: {value}."
        return NEEDLE_BEFORE, hidden, NEEDLE_AFTER.format(key=key), f" {value}"

    if text is None:
        return _examples(hide, [NOISE], "\n", encode, length, depths, seed)
    # An essay, from a random sentence on.
    parts = re.split(r"(?<=[.!?])\s+|\n+", text)
    sentences = [part.strip() for part in parts if part.strip()]
    return _examples(hide, sentences, " ", encode, length, depths, seed)


def _examples(hide, sentences, joint, encode, length, depths, seed):
    """Returns an example for each depth, with as many sentences as fit."""
    generator, examples = np.random.default_rng(seed), []
    for depth in depths:
        start = int(generator.integers(len(sentences)))
        before, hidden, after, answer = hide(generator)

        def prompt(size, start=start, depth=depth, parts=(before, hidden, after)):
            haystack = [sentences[(start + i) % len(sentences)] for i in range(size)]
            haystack.insert(round(depth * size), parts[1])
            return parts[0] + joint.join(haystack) + parts[2]

        size = 1
        while len(encode(prompt(size + 1) + answer)) <= length:
            size += 1
        first, whole = encode(prompt(size)), encode(prompt(size) + answer)
        if len(whole) > length or whole[: len(first)] != first:
            raise ValueError(
                f"`length` must be at least {len(whole)}, and `encode` must encode the "
                f"beginning of a text as it encodes the text. Received: {length=}."
            )
        examples.append((np.array(first, "int32"), np.array(whole[len(first) :])))
    return examples
