"""Scores what a language model recalls, and compares scores of models."""

import itertools
from typing import NamedTuple

import numpy as np

from keras_rfattn.diagnostics.recall.scorer import Scorer
from keras_rfattn.feature_maps.arguments import check_choice, is_integer
from keras_rfattn.layers.checks import check_sizes

# Examples are padded to multiples of it, because backends compile for every length.
MULTIPLE = 256


def accuracy(model, examples, batch_size=8):
    """Computes the share of examples whose whole answer is the greedy prediction.

    The true answer is given to the model, and every token of it must be the most
    probable one. Greedy generation from the prompt alone is right in the same cases.

    Args:
        model: A KerasHub `CausalLM` of text, a Keras model that maps tokens `(B, T)` to
            logits `(B, T, vocabulary_size)`, or a function that does. It must be
            causal, because examples are padded at the end.
        examples: List of `Example`, or of pairs `(prompt, answer)`.
        batch_size: Number of examples that are evaluated at once.

    Returns:
        A float from 0 to 1.

    Raises:
        TypeError: If `model` is neither a Keras layer nor a function, or if its
            backbone has no `token_embedding`.
        ValueError: If there are no examples, a prompt or answer is not a non-empty row
            of tokens, `batch_size` is not a positive integer, the model does not
            return logits for every token, or there are tokens that it does not know.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> example = recall.Example(np.array([3, 1]), np.array([2]))
        >>> always_two = lambda ids: np.tile(np.eye(4)[2], (*ids.shape, 1))
        >>> recall.accuracy(always_two, [example])
        1.0
    """
    return evaluate(model, examples, batch_size)["accuracy"]


def log_likelihood(model, examples, batch_size=8):
    """Computes the mean log-likelihood of the tokens of the answers.

    It also differs between models that recall nothing exactly.

    Args:
        model: A causal model, as for `accuracy`.
        examples: List of `Example`, or of pairs `(prompt, answer)`.
        batch_size: Number of examples that are evaluated at once.

    Returns:
        A float, in nats per token.

    Raises:
        TypeError: As for `accuracy`.
        ValueError: As for `accuracy`.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> example = recall.Example(np.array([3, 1]), np.array([2]))
        >>> uniform = lambda ids: np.zeros((*ids.shape, 4))
        >>> round(recall.log_likelihood(uniform, [example]), 4)
        -1.3863
    """
    return evaluate(model, examples, batch_size)["log_likelihood"]


def evaluate(model, examples, batch_size=8):
    """Computes both `accuracy` and `log_likelihood` in one pass over the examples.

    Args:
        model: A causal model, as for `accuracy`.
        examples: List of `Example`, or of pairs `(prompt, answer)`.
        batch_size: Number of examples that are evaluated at once.

    Returns:
        A dict from the names of the two functions to what they return.

    Raises:
        TypeError: As for `accuracy`.
        ValueError: As for `accuracy`.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> example = recall.Example(np.array([3, 1]), np.array([2]))
        >>> always_two = lambda ids: np.tile(np.eye(4)[2], (*ids.shape, 1))
        >>> recall.evaluate(always_two, [example])["accuracy"]
        1.0
    """
    scores = _scored(model, examples, batch_size)
    is_right = (scores.is_right | ~scores.is_answer).all(axis=1)
    log_probs = scores.log_probs[scores.is_answer]
    return {
        "accuracy": float(is_right.mean()),
        "log_likelihood": float(log_probs.mean(dtype="float64")),
    }


def metric(examples, kind="log_likelihood", batch_size=8):
    """Returns a metric of recall for `diagnostics.attribute` and `sensitivity`.

    Args:
        examples: List of `Example`, or of pairs `(prompt, answer)`.
        kind: `"log_likelihood"` or `"accuracy"`, the function of that name.
        batch_size: Number of examples that are evaluated at once.

    Returns:
        A function `(model, data=None) -> number`, which ignores the data.

    Raises:
        ValueError: If `kind` is another name, there are no examples, a prompt or answer
            is not a non-empty row of tokens, or `batch_size` is not a positive integer.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> from keras_rfattn.diagnostics import recall
        >>> model = keras_rfattn.models.transformer_pp(
        ...     attention="favorplus", vocabulary_size=20, num_layers=1, num_heads=2,
        ...     head_dim=8, num_features=16)
        >>> metric = recall.metric([recall.Example([5, 6, 5], [6])])
        >>> result = diagnostics.sensitivity(model, None, metric, verbose=0)
        >>> result.as_it_is == metric(model)
        True
    """
    check_choice("kind", kind, ("log_likelihood", "accuracy"))
    check_sizes(batch_size=batch_size)
    examples = _checked(examples)

    def evaluated(model, data=None):
        return evaluate(model, examples, batch_size)[kind]

    return evaluated


def perplexity_by_position(
    model, rows, edges=(0, 512, 1024, 2048, 4096, 8192), batch_size=1
):
    """Computes the perplexity of tokens by their position.

    A model that uses its context has a lower perplexity at later positions.

    Args:
        model: A causal model, as for `accuracy`.
        rows: Integers of shape `(N, T)`, texts without padding.
        edges: Increasing positions; each interval reaches from one to the next, which
            it excludes. Intervals end with the rows.
        batch_size: Number of rows that are evaluated at once.

    Returns:
        Dict from intervals `(start, stop)` to floats. It has no interval without a
        predicted token, and the first token of a row is not predicted.

    Raises:
        TypeError: As for `accuracy`.
        ValueError: If `rows` are not rows of at least two tokens, `edges` do not
            increase or the rows have no token between them, or for the reasons of
            `accuracy`.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> rows = np.random.default_rng(0).integers(0, 4, (2, 10))
        >>> uniform = lambda ids: np.zeros((*ids.shape, 4))
        >>> found = recall.perplexity_by_position(uniform, rows, edges=(0, 5, 20))
        >>> {interval: round(x, 4) for interval, x in found.items()}
        {(0, 5): 4.0, (5, 10): 4.0}
    """
    rows = _checked_rows(rows)
    check_sizes(batch_size=batch_size)
    length = rows.shape[1]
    intervals = _intervals(edges, length)
    scorer = Scorer(model)
    log_probs = np.zeros((len(rows), length - 1))
    for batch in _batches(np.arange(len(rows)), min(batch_size, len(rows))):
        ids = rows[batch]
        places = np.tile(np.arange(length - 1, dtype="int32"), (len(ids), 1))
        log_probs[batch], _ = scorer(ids, np.ones_like(ids), places, ids[:, 1:])
    return {
        (start, stop): float(np.exp(-log_probs[:, max(start, 1) - 1 : stop - 1].mean()))
        for start, stop in intervals
    }


def win_and_tie_rate(scores_a, scores_b):
    """Computes the share of tests in which a model scores at least as much as another.

    Args:
        scores_a: Scores of a model, a list of numbers.
        scores_b: Scores of another model in the same tests.

    Returns:
        A float from 0 to 1.

    Raises:
        ValueError: If the scores are not finite, or not the same number of scores.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> recall.win_and_tie_rate([0.9, 0.5, 0.1, 0.0], [1.0, 0.5, 0.0, 0.0])
        0.75
    """
    a, b = _checked_scores(scores_a, scores_b)
    return float((a >= b).mean())


def relative_score(scores_a, scores_b):
    """Computes the mean over tests of the scores of a model divided by another's.

    Args:
        scores_a: Scores of a model, a list of numbers.
        scores_b: Scores of another model in the same tests, which must be positive.

    Returns:
        A float.

    Raises:
        ValueError: If the scores are not finite, not the same number of scores, or if
            one of `scores_b` is not positive.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> recall.relative_score([0.5, 0.25], [1.0, 0.25])
        0.75
    """
    a, b = _checked_scores(scores_a, scores_b)
    if (b <= 0).any():
        raise ValueError(
            "`scores_b` must be positive. Received: the smallest is "
            f"{b.min():g}. Use `win_and_tie_rate`, or leave such tests out."
        )
    return float((a / b).mean())


class _Scores(NamedTuple):
    """Of each example and place of its answer, as arrays of shape `(N, A)`."""

    log_probs: np.ndarray
    is_right: np.ndarray
    is_answer: np.ndarray


def _scored(model, examples, batch_size):
    """Returns the `_Scores` of examples; shorter answers are padded."""
    examples = _checked(examples)
    check_sizes(batch_size=batch_size)
    scorer = Scorer(model)
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in examples])
    widths = np.array([len(answer) for _, answer in examples])
    is_answer = np.arange(widths.max()) < widths[:, None]
    log_probs, is_right = np.zeros(is_answer.shape), np.zeros(is_answer.shape, bool)
    # Not above the longest example, because the model may know no more positions.
    padded = np.minimum(-(-lengths // MULTIPLE) * MULTIPLE, lengths.max())
    for length in np.unique(padded):
        members = np.flatnonzero(padded == length)
        for batch in _batches(members, min(batch_size, len(examples))):
            arrays = _padded([examples[i] for i in batch], length, widths.max())
            log_probs[batch], is_right[batch] = scorer(*arrays)
    return _Scores(log_probs, is_right, is_answer)


def _batches(indices, size):
    """Yields batches of one size; the last repeats an index if it must."""
    for i in range(0, len(indices), size):
        batch = indices[i : i + size]
        yield np.pad(batch, (0, size - len(batch)), mode="edge")


def _padded(examples, length, width):
    """Returns `(ids, mask, places, targets)` of examples, padded at the end."""
    ids, mask = np.zeros((2, len(examples), length), "int32")
    places, targets = np.zeros((2, len(examples), width), "int32")
    for i, (prompt, answer) in enumerate(examples):
        start, stop = len(prompt), len(prompt) + len(answer)
        ids[i, :start], ids[i, start:stop], mask[i, :stop] = prompt, answer, 1
        places[i, : len(answer)] = np.arange(start - 1, stop - 1)
        targets[i, : len(answer)] = answer
    return ids, mask, places, targets


def _checked(examples):
    """Returns examples as a list of pairs of arrays, or raises `ValueError`."""
    try:
        pairs = [
            (np.asarray(prompt), np.asarray(answer)) for prompt, answer in examples
        ]
    except (TypeError, ValueError):
        pairs = []
    rows = [row for pair in pairs for row in pair]
    is_row = [x.ndim == 1 and x.size and x.dtype.kind in "iu" for x in rows]
    if not rows or not all(is_row) or min(x.min() for x in rows) < 0:
        raise ValueError(
            "`examples` must be a non-empty list of pairs of a prompt and an answer, "
            "each a non-empty list of non-negative integers. Received: "
            f"examples={examples!r:.80}. Use `passkey`, `needle` or "
            "`variable_tracking`."
        )
    return pairs


def _checked_rows(rows):
    """Returns rows as an array, or raises `ValueError`."""
    found = np.asarray(rows)
    is_table = found.ndim == 2 and found.dtype.kind in "iu"
    if not is_table or len(found) < 1 or found.shape[1] < 2 or found.min() < 0:
        raise ValueError(
            "`rows` must be non-negative integers of shape (N, T) with at least two "
            f"tokens. Received: shape {found.shape} and dtype {found.dtype}. Use rows "
            "of one length, without padding."
        )
    return found.astype("int32")


def _intervals(edges, length):
    """Returns intervals of positions that hold a predicted token."""
    edges = list(edges) if isinstance(edges, (list, tuple, np.ndarray)) else [edges]
    are_positions = all(is_integer(x) and x >= 0 for x in edges)
    pairs = itertools.pairwise(edges) if are_positions else ()
    cut = [(int(start), min(int(stop), length)) for start, stop in pairs]
    found = [(start, stop) for start, stop in cut if max(start, 1) < stop]
    if not found or edges != sorted(set(edges)):
        raise ValueError(
            "`edges` must be increasing positions, between which the rows have tokens "
            f"after their first. Received: edges={edges!r:.80} for rows of {length} "
            "tokens."
        )
    return found


def _checked_scores(scores_a, scores_b):
    """Returns scores as two arrays, or raises `ValueError`."""
    a, b = np.asarray(scores_a), np.asarray(scores_b)
    are_numbers = a.dtype.kind in "iuf" and b.dtype.kind in "iuf"
    if a.ndim != 1 or a.shape != b.shape or not a.size or not are_numbers:
        raise ValueError(
            "`scores_a` and `scores_b` must be non-empty lists of equally many "
            f"numbers. Received: shapes {a.shape} and {b.shape}."
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(
            "`scores_a` and `scores_b` must be finite. Received: "
            f"scores_a={a.tolist()!r:.60}, scores_b={b.tolist()!r:.60}."
        )
    return a, b
