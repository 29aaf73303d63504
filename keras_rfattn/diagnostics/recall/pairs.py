"""Generates sequences of key-value pairs and queries, for small models."""

import numpy as np

from keras_rfattn.diagnostics.recall.texts import check_required_seed
from keras_rfattn.feature_maps.arguments import is_number
from keras_rfattn.layers.checks import check_sizes


def mqar(num_sequences, length, num_pairs, vocabulary_size, seed=0, power=0.01):
    """Generates multi-query associative recall, to train and evaluate small models.

    A sequence begins with key-value pairs. Each key occurs once more at an even
    distance behind them, a query, and the target there is its value. The other tokens
    behind the pairs are random values, so that no key has two values. Keys are tokens
    from 1 to `vocabulary_size // 2 - 1`, and values the tokens above.

    Args:
        num_sequences: Number of sequences N.
        length: Number of tokens T of a sequence, at least four times `num_pairs`.
        num_pairs: Number of key-value pairs, which are also all queried.
        vocabulary_size: Number of tokens, at least `2 * num_pairs + 2`. The paper uses
            8192, and finds that few tokens hide differences between models.
        seed: Non-negative integer. Equal seeds give equal sequences.
        power: Positive number a. A query stands in the i-th place behind the pairs
            with a probability proportional to `i ** (a - 1)`; with 1 it is uniform.

    Returns:
        `(inputs, targets, weights)`, arrays of shape `(N, T)`: int32 tokens, int32
        targets that are 0 where nothing is asked, and float32 weights that are 1 at
        the queries and 0 elsewhere.

    Raises:
        ValueError: If a number is not a positive integer, `length` or
            `vocabulary_size` is too small for the pairs, `power` is not positive, or
            `seed` is not a non-negative integer.

    Reference:
        Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language
        Models" (2023), whose sequences also have random keys between the queries.

    Examples:
        >>> from keras_rfattn.diagnostics import recall
        >>> inputs, targets, weights = recall.mqar(
        ...     1, length=16, num_pairs=2, vocabulary_size=20)
        >>> key, value = inputs[0, :2]
        >>> bool(targets[0, 4:][inputs[0, 4:] == key] == value)
        True
    """
    check_sizes(
        num_sequences=num_sequences,
        length=length,
        num_pairs=num_pairs,
        vocabulary_size=vocabulary_size,
    )
    _check_room(length, num_pairs, vocabulary_size, power)
    check_required_seed(seed)
    generator = np.random.default_rng(seed)
    half, first = vocabulary_size // 2, 2 * num_pairs

    keys = 1 + _distinct(generator, num_sequences, half - 1, num_pairs)
    values = half + _distinct(
        generator, num_sequences, vocabulary_size - half, num_pairs
    )
    inputs = generator.integers(half, vocabulary_size, (num_sequences, length))
    inputs[:, 0:first:2], inputs[:, 1:first:2] = keys, values

    gaps = _gaps(generator, num_sequences, (length - first) // 2, num_pairs, power)
    places = first + 2 * gaps
    targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, "float32")
    np.put_along_axis(inputs, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    np.put_along_axis(weights, places, 1, axis=1)
    return inputs.astype("int32"), targets.astype("int32"), weights


def _check_room(length, num_pairs, vocabulary_size, power):
    if length < 4 * num_pairs:
        raise ValueError(
            f"`length` must be at least {4 * num_pairs}, four times `num_pairs`. "
            f"Received: length={length}, num_pairs={num_pairs}. Use a larger `length` "
            "or fewer pairs."
        )
    if vocabulary_size < 2 * num_pairs + 2:
        raise ValueError(
            f"`vocabulary_size` must be at least {2 * num_pairs + 2}, for different "
            f"keys and values. Received: vocabulary_size={vocabulary_size}, "
            f"num_pairs={num_pairs}. Use a larger `vocabulary_size` or fewer pairs."
        )
    if not (is_number(power) and 0 < power < np.inf):
        raise ValueError(
            f"`power` must be a positive number. Received: power={power!r}. Use 1 for "
            "uniform places."
        )


def _distinct(generator, rows, stop, count):
    """Returns rows of `count` distinct integers below `stop`."""
    drawn = [generator.choice(stop, count, replace=False) for _ in range(rows)]
    return np.stack(drawn)


def _gaps(generator, rows, places, count, power):
    """Returns rows of `count` distinct places below `places`, drawn by a power law."""
    log_weights = (power - 1) * np.log(np.arange(1, places + 1))
    # The largest sums with Gumbel noise are a draw without replacement (Vieira, 2014).
    noise = generator.gumbel(size=(rows, places))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count]
