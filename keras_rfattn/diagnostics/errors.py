"""Errors of estimated softmax attention by head, computed in NumPy float64."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.predict import predicted_variance


class HeadErrors(NamedTuple):
    """Relative errors of one head on some sequences; 0 is exact.

    A is the softmax attention matrix, Â its estimate and V the values. A pair is a
    query and a key that it sees, and m is the number of random vectors.

    Attributes:
        kernel: Median over pairs of `|estimate / kernel - 1|`. This field and the next
            three are NaN for maps whose kernel is not softmax.
        covered: Fraction of pairs for which m vectors are enough. A pair x, y is
            covered if `‖x + s y‖² <= log m` (s = -1 for trigonometric features, else
            1), which bounds the relative variance of positive features by 1, and if
            the closed form, where there is one, also gives at most 1. Here x and y are
            the query and key as the random vectors see them (see `FeatureMap.meets`).
            For all other pairs the width is too small.
        measured: Root mean square of `estimate / kernel - 1` over covered pairs; NaN if
            no pair is covered.
        predicted: The value of `measured` that the closed form predicts; NaN if no pair
            is covered or there is no closed form.
        attention: `‖Â - A‖ / ‖A‖`, in the Frobenius norm.
        output: `‖Â V - A V‖ / ‖A V‖`.
        mean_of_values: The error `output` of uniform attention, which is what no
            attention at all would reach. (The error of zero output is 1.)
        negative: Fraction of estimates below 0.
        kolmogorov_smirnov: Largest distance between the cumulative distributions of
            the rows of Â and A over key positions, averaged over rows.
        wasserstein: Mean distance between these cumulative distributions, averaged
            over rows. This is the one-dimensional Wasserstein metric with keys at
            equal distances on [0, 1].
    """

    kernel: float
    covered: float
    measured: float
    predicted: float
    attention: float
    output: float
    mean_of_values: float
    negative: float
    kolmogorov_smirnov: float
    wasserstein: float

    @classmethod
    def mean(cls, errors):
        """Averages several `HeadErrors`.

        `measured` and `predicted` are root mean squares over all covered pairs.
        """
        rows = np.array(errors)
        result = rows.mean(axis=0)
        covered = rows[:, cls._fields.index("covered")]
        for field in ("measured", "predicted"):
            i = cls._fields.index(field)
            squares = rows[covered > 0, i] ** 2
            result[i] = np.nan
            if len(squares):
                weights = covered[covered > 0]
                result[i] = np.sqrt(np.average(squares, weights=weights))
        return cls(*result.tolist())


class Estimate(NamedTuple):
    """Estimated kernel values of one sequence, `values · exp(log_scale)`.

    K is the number of key heads, T of query rows and S of keys.

    Attributes:
        values: Array of shape `(K, T, S)`.
        log_scale: Array of shape `(K, T, 1)`, the largest exponent of each row.
        stats: The statistics of the sequence, from the map's `statistics`.
    """

    values: np.ndarray
    log_scale: np.ndarray
    stats: object


def estimate(feature_map, sequence):
    """Estimates the kernel for all pairs of queries and keys of one sequence.

    Args:
        feature_map: A built `FeatureMap`.
        sequence: A `keras_rfattn.layers.recording.Sequence`.

    Returns:
        An `Estimate`.

    Raises:
        ValueError: If the map belongs to polynomial attention, which does not estimate
            softmax.
    """
    if feature_map.is_preparing:
        raise ValueError(
            "`feature_map` must estimate softmax attention. Received: feature_map="
            f"{feature_maps.name_of(feature_map)!r}, which belongs to polynomial "
            "attention. Use a map whose `kernel` is 'softmax'."
        )
    query, key = (
        ops.convert_to_tensor(x.swapaxes(0, 1)[None].astype("float32"))
        for x in (sequence.query, sequence.key)
    )
    stats = feature_map.statistics(query, key, causal=sequence.causal)
    q, q_scale = _parts(feature_map.query_features(query, stats))
    k, k_scale = _parts(feature_map.key_features(key, stats))
    # For numerical stability, subtract the largest exponent of each feature over keys,
    # then the largest exponent of each query over features.
    top = k_scale.max(axis=1, keepdims=True)
    rows = q_scale + top
    shift = rows.max(axis=-1, keepdims=True)
    q, k = q * np.exp(rows - shift), k * np.exp(k_scale - top)
    return Estimate(q @ k.swapaxes(-1, -2), shift, stats)


def _parts(features):
    """Returns the values and exponents of n tokens as arrays `(K, n, M)`."""
    features = features.dense()
    return _array(features.ones_or_values()), _array(features.spread_scale())


def _array(x):
    return keras.ops.convert_to_numpy(x)[0].swapaxes(0, 1).astype("float64")


def is_covered(feature_map, query, key, head):
    """Returns for which pairs `‖x + s y‖² <= log m`, as booleans `(T, S)`."""
    x, y = feature_map.meets(query, key, head)
    y = feature_map.sign(head) * y
    squares = np.sum(x * x, -1)[:, None] + np.sum(y * y, -1) + 2 * x @ y.T
    return squares <= np.log(feature_map.num_features or feature_map.output_dim)


def visibility(sequence):
    """Returns which keys each query sees as booleans `(T · G, S)`, G heads per key."""
    rows, keys = sequence.query.shape[1], sequence.key.shape[1]
    if not sequence.causal:
        return np.ones((rows, keys), bool)
    visible = np.tri(keys, dtype=bool)
    if sequence.prefix is not None:
        visible |= sequence.prefix
    return np.repeat(visible, rows // keys, axis=0)


def head_errors(feature_map, sequences, head, estimates=None):
    """Measures the errors of one key/value head.

    Args:
        feature_map: A built `FeatureMap`.
        sequences: List of `keras_rfattn.layers.recording.Sequence`.
        head: Index of the key/value head.
        estimates: List with the `Estimate` of each sequence; computed if `None`.

    Returns:
        The `HeadErrors`, averaged over sequences.
    """
    if estimates is None:
        estimates = [estimate(feature_map, s) for s in sequences]
    return HeadErrors.mean(
        [
            _errors(feature_map, s, head, e)
            for s, e in zip(sequences, estimates, strict=True)
        ]
    )


def _errors(feature_map, sequence, head, estimate):
    query, key, value = sequence.query[head], sequence.key[head], sequence.value[head]
    values, shift = estimate.values[head], estimate.log_scale[head]
    visible = visibility(sequence)
    products = sequence.logit_scale * query @ key.T
    logits = products
    if sequence.softmax is not None:
        exact_query, exact_key = (x[head] for x in sequence.softmax)
        logits = exact_query @ exact_key.T
    logits = np.where(visible, logits, -np.inf)
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)

    with np.errstate(over="ignore", invalid="ignore"):
        ratio = values * np.exp(shift - products)
    weights = np.where(visible, values, 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    exact, mean = attention @ value, visible @ value / visible.sum(-1, keepdims=True)
    approximate = weights @ value

    positive = np.maximum(weights, 0)
    positive /= np.maximum(positive.sum(-1, keepdims=True), 1e-300)
    gap = np.abs(np.cumsum(positive - attention, axis=-1))

    return HeadErrors(
        *_kernel_errors(feature_map, head, query, key, ratio, visible, estimate.stats),
        np.linalg.norm(weights - attention) / np.linalg.norm(attention),
        np.linalg.norm(approximate - exact) / np.linalg.norm(exact),
        np.linalg.norm(mean - exact) / np.linalg.norm(exact),
        np.mean(values[visible] < 0),
        gap.max(-1).mean(),
        gap.mean(),
    )


def _kernel_errors(feature_map, head, query, key, ratio, visible, stats):
    """Returns four fields of `HeadErrors`, `kernel` to `predicted`.

    `ratio` is `estimate / kernel` for each pair.
    """
    if feature_map.kernel != "softmax":
        return np.nan, np.nan, np.nan, np.nan
    covered = visible & is_covered(feature_map, query, key, head)
    rows, keys = np.nonzero(covered)
    predict = predicted_variance(feature_map, head, stats)
    squares = np.full(len(rows), np.nan)
    if predict is not None:
        squares = predict(query[rows], key[keys])
        few = squares > 1
        covered[rows[few], keys[few]] = False
        squares = squares[~few]
    measured = predicted = np.nan
    if covered.any():
        measured = np.sqrt(np.mean((ratio[covered] - 1) ** 2))
        predicted = np.sqrt(np.mean(squares))
    median = np.median(np.abs(ratio[visible] - 1))
    return median, covered.sum() / visible.sum(), measured, predicted
