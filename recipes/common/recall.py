"""Scores of what a decoder recalls, and of texts; not a recipe itself."""

import numpy as np
from keras import ops

from keras_rfattn.backend import without_gradients

# Tokens whose logits are computed at once, which limits memory.
CHUNK = 512
# Tokens of an answer that are generated.
WRITTEN = 24


def evaluate(model, examples):
    """Returns the share of right answers, and log-likelihood per token, in a dict.

    An answer is "exact" if each of its tokens is the most probable one. It is right, as
    in RULER, if greedy generation writes it, perhaps after other characters.
    """
    scored = [score(model, np.concatenate(x)[None], len(x[0])) for x in examples]
    exact = [bool(is_right.all()) for _, is_right in scored]
    right = [x or writes(model, *y) for x, y in zip(exact, examples, strict=True)]
    return {
        "accuracy": float(np.mean(right)),
        "exact": float(np.mean(exact)),
        "log_likelihood": float(
            np.concatenate([x[0] for x, _ in scored]).mean(dtype="float64")
        ),
    }


def writes(model, prompt, answer):
    """Tells whether the next tokens of greedy generation hold an answer."""
    ids = np.concatenate([prompt, np.zeros(WRITTEN, prompt.dtype)])[None]
    mask = (np.arange(ids.shape[1]) < len(prompt))[None].astype("int32")
    model.compile(sampler="greedy")
    # Without its preprocessor, a task of KerasHub takes tokens.
    preprocessor, model.preprocessor = model.preprocessor, None
    inputs = {"token_ids": ids, "padding_mask": mask}
    try:
        made = model.generate(inputs, stop_token_ids=None)["token_ids"]
    finally:
        model.preprocessor = preprocessor
    made = ops.convert_to_numpy(made)[0, len(prompt) :]
    texts = [preprocessor.tokenizer.detokenize(x) for x in (answer, made)]
    answer, written = (str(ops.convert_to_numpy(x)) for x in texts)
    return answer.strip() in written


def perplexity(model, rows, intervals):
    """Returns a dict from intervals `(start, stop)` to the perplexity of their tokens.

    An interval ends with the rows at the latest. The first token of a row is not
    predicted, and intervals without a predicted token are left out.
    """
    log_probs = np.concatenate([score(model, row[None], 1)[0] for row in rows])
    intervals = [(a, min(b, rows.shape[1])) for a, b in intervals]
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
