"""Texts that test what a decoder recalls, and its scores; not a recipe itself.

A test hides a detail among sentences that fill a text to a number of tokens, and asks
for it at the end. An example is `(prompt, answer)`, two arrays of tokens.
"""

import re
import uuid

import numpy as np
from keras import ops

from keras_rfattn.backend import without_gradients

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
# Tokens whose logits are computed at once, which limits memory.
CHUNK = 512


def passkey(encode, length, count, seed=0):
    """Hides a pass key of five digits among repeated sentences.

    Mohtashami and Jaggi, "Landmark Attention" (2023). `encode` turns a text into a list
    of tokens. Prompt and answer have at most `length` tokens, and the keys of the
    `count` examples stand at evenly spaced places.
    """

    def hide(generator):
        key = generator.integers(10_000, 100_000)
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
        return PASSKEY_BEFORE, hidden, PASSKEY_AFTER, f" {key}"

    return _examples(hide, [NOISE], " ", encode, length, count, seed)


def needle(encode, length, count, seed=0, kind=1, text=None):
    """Hides one value, as `passkey` does: S-NIAH-1, 2 and 3 of RULER (2024).

    `kind` is 1 for repeated sentences and a number of seven digits, 2 for the essay
    `text`, which begins at a random sentence, and such a number, 3 for it and a UUID.
    """
    name = "uuid" if kind == 3 else "number"

    def hide(generator):
        key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
        value = generator.integers(10**6, 10**7)
        if kind == 3:
            value = uuid.UUID(bytes=generator.bytes(16), version=4)
        hidden = f"One of the special magic {name}s for {key} is: {value}."
        before = NEEDLE_BEFORE.format(value=name)
        return before, hidden, NEEDLE_AFTER.format(value=name, key=key), f" {value}"

    if kind == 1:
        return _examples(hide, [NOISE], "\n", encode, length, count, seed)
    parts = re.split(r"(?<=[.!?])\s+|\n+", text)
    sentences = [part.strip() for part in parts if part.strip()]
    return _examples(hide, sentences, " ", encode, length, count, seed)


def _examples(hide, sentences, joint, encode, length, count, seed):
    """Returns examples with as many sentences as fit, at least one."""
    generator, examples = np.random.default_rng(seed), []
    for depth in np.linspace(0, 1, count):
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


def evaluate(model, examples):
    """Returns the share of right answers, and log-likelihood per token, in a dict.

    An answer is right if each of its tokens is the most probable one.
    """
    scored = [score(model, np.concatenate(x)[None], len(x[0])) for x in examples]
    return {
        "accuracy": float(np.mean([is_right.all() for _, is_right in scored])),
        "log_likelihood": float(
            np.concatenate([x[0] for x, _ in scored]).mean(dtype="float64")
        ),
    }


def perplexity_by_position(model, rows, edges):
    """Returns a dict from intervals `(start, stop)` to the perplexity of their tokens.

    Intervals reach from one edge to the next, or to the end of the rows. The first
    token of a row is not predicted.
    """
    log_probs = np.concatenate([score(model, row[None], 1)[0] for row in rows])
    intervals = [
        (a, min(b, rows.shape[1])) for a, b in zip(edges, edges[1:], strict=False)
    ]
    return {
        (a, b): float(
            np.exp(-log_probs[:, max(a, 1) - 1 : b - 1].mean(dtype="float64"))
        )
        for a, b in intervals
        if max(a, 1) < b
    }


def score(model, ids, start):
    """Scores the tokens from `start` on of rows `(B, T)` under a KerasHub `CausalLM`.

    Returns:
        `(log_probs, is_right)`, arrays of shape `(B, T - start)`: the log-probability
        of each token, and whether it is the most probable one.
    """
    backbone, parts = model.backbone, []
    # Not `predict`: its compiled function would not know what layers compute later.
    with without_gradients():
        inputs = {"token_ids": ops.convert_to_tensor(ids, "int32")}
        inputs["padding_mask"] = ops.ones_like(inputs["token_ids"])
        x = backbone(inputs, training=False)
        for i in range(start, ids.shape[1], CHUNK):
            targets = inputs["token_ids"][:, i : i + CHUNK]
            states = x[:, i - 1 : i - 1 + targets.shape[1]]
            logits = backbone.token_embedding(states, reverse=True)
            log_probs = ops.log_softmax(ops.cast(logits, "float32"))
            chosen = ops.take_along_axis(log_probs, targets[:, :, None], axis=2)
            is_right = ops.equal(ops.cast(ops.argmax(logits, -1), "int32"), targets)
            found = chosen[:, :, 0], is_right
            # At once, so that no more than one chunk waits for the device.
            parts.append([ops.convert_to_numpy(y) for y in found])
    return [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
