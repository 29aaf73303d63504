"""Generates long texts that hide what a question at their end asks for."""

import re
import string
import uuid
from typing import NamedTuple

import numpy as np

from keras_rfattn.diagnostics.recall.haystack import Form, Haystack, encoder
from keras_rfattn.feature_maps.arguments import check_seed, is_integer, is_number
from keras_rfattn.layers.checks import check_sizes

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
    "A special magic {value} is hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {value} afterwards.\n"
)
NEEDLE_AFTER = (
    "\nWhat is the special magic {value} for {key} mentioned in the provided text? "
    "The special magic {value} for {key} mentioned in the provided text is"
)
VARIABLES_BEFORE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n"
)
VARIABLES_AFTER = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text "
    "above, {count} variables are assigned the value {value}, they are:"
)
# Keys of needles are an adjective and a noun.
ADJECTIVES = (
    "able", "big", "blue", "brave", "bright", "calm", "clean", "clever", "cold", "dark",
    "deep", "dry", "early", "fair", "fast", "fine", "fresh", "full", "grand", "great",
    "happy", "kind", "late", "long", "loud", "new", "old", "proud", "quick", "quiet",
    "round", "sharp", "short", "slow", "soft", "strong", "sweet", "tall", "warm",
    "wise",
)  # fmt: skip
NOUNS = (
    "apple", "basket", "bird", "boat", "book", "bridge", "butter", "camera", "candle",
    "castle", "chair", "city", "cloud", "coat", "door", "farm", "fish", "flower",
    "forest", "garden", "hammer", "horse", "house", "island", "king", "ladder", "lake",
    "lamp", "letter", "market", "mirror", "mountain", "ocean", "paper", "pencil",
    "river", "school", "ship", "table", "window",
)  # fmt: skip


class Example(NamedTuple):
    """A prompt and its answer, as int32 arrays of tokens.

    Attributes:
        prompt: Tokens of the text and its question, of shape `(P,)`.
        answer: Tokens that should follow, of shape `(A,)`.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> example = recall.Example(np.array([5, 6, 5]), np.array([6]))
        >>> example.answer.tolist()
        [6]
    """

    prompt: np.ndarray
    answer: np.ndarray


def passkey(tokenizer, length, num_examples=100, depths="even", seed=0):
    """Generates texts of repeated sentences that hide a pass key of five digits.

    The number of digits is fixed, so that all answers are equally long.

    Args:
        tokenizer: A function from a text to a list of integers, or an object with such
            a method `encode`. The method may also return an object with `ids`.
        length: Largest number of tokens of prompt and answer together. A prompt has as
            many sentences as fit.
        num_examples: Number of examples.
        depths: Share of the repeated sentences that precedes the pass key: `"even"`
            for evenly spaced shares from 0 to 1, `"random"` for shares drawn by the
            seed, or a list of shares, which is repeated.
        seed: Non-negative integer. Equal seeds give equal examples.

    Returns:
        A list of `Example`.

    Raises:
        TypeError: If the tokenizer does not return integers.
        ValueError: If `length` is too small for the question and one sentence,
            `num_examples` is not positive, `depths` are not from 0 to 1, `seed` is
            not a non-negative integer, or the tokenizer pads, truncates, or adds
            tokens at the end.

    Reference:
        Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context
        Length for Transformers" (2023).

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> characters = lambda text: [ord(character) for character in text]
        >>> example = recall.passkey(characters, length=500, num_examples=3)[1]
        >>> answer = "".join(map(chr, example.answer))
        >>> f"The pass key is{answer}." in "".join(map(chr, example.prompt))
        True
    """

    def form(generator, depth):
        key = generator.integers(10_000, 100_000)
        statement = f"The pass key is {key}. Remember it. {key} is the pass key."
        return Form(PASSKEY_BEFORE, [statement], [depth], PASSKEY_AFTER, f" {key}")

    haystack = Haystack([NOISE], " ", encoder(tokenizer))
    return _examples(form, haystack, length, num_examples, depths, seed)


def needle(
    tokenizer, length, kind=1, text=None, num_examples=100, depths="even", seed=0
):
    """Generates texts that hide one value, a needle in a haystack.

    The tests are S-NIAH-1, 2 and 3 of RULER. The haystack of the second and third is
    an essay, which begins at a sentence drawn by the seed and is repeated if it is too
    short.

    Args:
        tokenizer: A function from a text to a list of integers, or an object with such
            a method `encode`. The method may also return an object with `ids`.
        length: Largest number of tokens of prompt and answer together. A prompt has as
            many sentences as fit.
        kind: 1 for repeated sentences and a number of seven digits, 2 for an essay and
            such a number, 3 for an essay and a UUID.
        text: The essay, a string, for kinds 2 and 3. RULER uses essays of Paul Graham.
        num_examples: Number of examples.
        depths: Share of the haystack that precedes the needle: `"even"` for evenly
            spaced shares from 0 to 1, `"random"` for shares drawn by the seed, or a
            list of shares, which is repeated.
        seed: Non-negative integer. Equal seeds give equal examples.

    Returns:
        A list of `Example`.

    Raises:
        TypeError: If the tokenizer does not return integers.
        ValueError: If `kind` is not 1, 2 or 3, `text` is missing or not used, or for
            the reasons of `passkey`.

    Reference:
        Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
        Language Models?" (2024).

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> characters = lambda text: [ord(character) for character in text]
        >>> essay = "Some days are long. Others are short. Few are neither."
        >>> example = recall.needle(
        ...     characters, length=900, kind=2, text=essay, num_examples=3)[1]
        >>> answer = "".join(map(chr, example.answer))
        >>> f" is:{answer}." in "".join(map(chr, example.prompt))
        True
    """
    if not is_integer(kind) or kind not in (1, 2, 3):
        raise ValueError(
            f"`kind` must be 1, 2 or 3. Received: kind={kind!r}. Use 1 for repeated "
            "sentences, 2 for an essay, and 3 for an essay with a UUID."
        )
    name = "uuid" if kind == 3 else "number"

    def form(generator, depth):
        key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
        value = generator.integers(10**6, 10**7)
        if kind == 3:
            value = uuid.UUID(bytes=generator.bytes(16), version=4)
        statement = f"One of the special magic {name}s for {key} is: {value}."
        before = NEEDLE_BEFORE.format(value=name)
        after = NEEDLE_AFTER.format(value=name, key=key)
        return Form(before, [statement], [depth], after, f" {value}")

    sentences, joint = _haystack(kind, text)
    haystack = Haystack(sentences, joint, encoder(tokenizer))
    return _examples(form, haystack, length, num_examples, depths, seed)


def variable_tracking(
    tokenizer, length, num_chains=1, num_hops=4, num_examples=100, seed=0
):
    """Generates texts that hide chains of assignments, `VAR B = VAR A`.

    The question asks for all variables of the first chain, and the answer names them
    in the order of the chain. RULER shows a solved example first, and accepts any
    order; these prompts contain no solved example.

    Args:
        tokenizer: A function from a text to a list of integers, or an object with such
            a method `encode`. The method may also return an object with `ids`.
        length: Largest number of tokens of prompt and answer together. A prompt has as
            many sentences as fit.
        num_chains: Number of chains. The question asks for one of them.
        num_hops: Number of assignments of a variable to another in each chain.
        num_examples: Number of examples.
        seed: Non-negative integer, which also draws where the assignments are hidden.
            Equal seeds give equal examples.

    Returns:
        A list of `Example`.

    Raises:
        TypeError: If the tokenizer does not return integers.
        ValueError: If `num_chains` or `num_hops` is not a positive integer, or for the
            reasons of `passkey`.

    Reference:
        Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
        Language Models?" (2024).

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> characters = lambda text: [ord(character) for character in text]
        >>> example = recall.variable_tracking(characters, 900, num_hops=2, seed=0)[0]
        >>> first, second, third = "".join(map(chr, example.answer)).split()
        >>> f"VAR {third} = VAR {second}" in "".join(map(chr, example.prompt))
        True
    """
    check_sizes(num_chains=num_chains, num_hops=num_hops)

    def form(generator, _):
        names = _variables(generator, num_chains * (num_hops + 1))
        values = 10_000 + generator.choice(90_000, num_chains, replace=False)
        chains = np.reshape(names, (num_chains, num_hops + 1))
        hidden = []
        for chain, value in zip(chains, values, strict=True):
            sources = [f"{value}", *(f"VAR {name}" for name in chain[:-1])]
            depths = np.sort(generator.random(num_hops + 1))
            hidden += [
                (depth, f"VAR {name} = {source}")
                for depth, name, source in zip(depths, chain, sources, strict=True)
            ]
        depths, statements = zip(*sorted(hidden), strict=True)
        after = VARIABLES_AFTER.format(value=values[0], count=num_hops + 1)
        answer = " " + " ".join(chains[0])
        return Form(VARIABLES_BEFORE, statements, depths, after, answer)

    haystack = Haystack([NOISE], "\n", encoder(tokenizer))
    return _examples(form, haystack, length, num_examples, "even", seed)


def _variables(generator, count):
    """Returns distinct names of five capital letters."""
    letters, names = list(string.ascii_uppercase), {}
    while len(names) < count:
        # A dict keeps the order in which names are drawn, a set does not.
        names["".join(generator.choice(letters, 5))] = None
    return list(names)


def _haystack(kind, text):
    """Returns `(sentences, joint)` of the haystack of a kind of needle."""
    if kind == 1:
        if text is not None:
            raise ValueError(
                "`text` must be `None` for kind 1, which repeats sentences of its own. "
                f"Received: text={text!r:.40}. Use kind 2 or 3 for an essay."
            )
        return [NOISE], "\n"
    parts = re.split(r"(?<=[.!?])\s+|\n+", text) if isinstance(text, str) else ()
    sentences = [part.strip() for part in parts if part.strip()]
    if not sentences:
        raise ValueError(
            f"`text` must be a non-empty string for kind {kind}. Received: "
            f"text={text!r:.40}. Use an essay, or kind 1, which needs none."
        )
    return sentences, " "


def _examples(form, haystack, length, num_examples, depths, seed):
    """Returns examples of the forms that `form(generator, depth)` draws."""
    check_sizes(length=length, num_examples=num_examples)
    check_required_seed(seed)
    generator = np.random.default_rng(seed)
    examples = []
    for depth in _depths(depths, num_examples, generator):
        start = int(generator.integers(len(haystack.sentences)))
        ids = haystack.ids(form(generator, depth), length, start)
        examples.append(Example(*ids))
    return examples


def check_required_seed(seed):
    """Raises `ValueError` unless `seed` is a non-negative integer."""
    check_seed(seed)
    if seed is None:
        raise ValueError("`seed` must be a non-negative integer. Received: seed=None.")


def _depths(depths, count, generator):
    """Returns a depth for each of `count` examples."""
    if isinstance(depths, str) and depths == "even":
        return np.linspace(0, 1, count)
    if isinstance(depths, str) and depths == "random":
        return generator.random(count)
    listed = list(depths) if isinstance(depths, (list, tuple, np.ndarray)) else []
    if not listed or not all(is_number(x) and 0 <= x <= 1 for x in listed):
        raise ValueError(
            "`depths` must be 'even', 'random' or a non-empty list of numbers from 0 "
            f"to 1. Received: depths={depths!r:.80}."
        )
    return np.resize(listed, count)
