"""Errors of an estimate of softmax attention, for one head: NumPy, float64."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.predict import predicted_variance


class HeadErrors(NamedTuple):
    """Errors of one head on some sequences, each relative; 0 is exact.

    Attributes:
        kernel: Median over pairs of `|estimate / kernel - 1|`; this and the next
            three are NaN for maps of another kernel than softmax.
        covered: Fraction of pairs for which the m vectors are enough:
            `‖x + s y‖² <= log m` of what they meet (s = -1 for trigonometric
            features, else 1), where positive features have a relative variance of
            at most 1, and the closed form, if there is one, says at most 1 too. For
            the others the width is too small.
        measured: Root of the mean square of `estimate / kernel - 1` over covered
            pairs; NaN if there is none.
        predicted: What the closed form says of `measured`; NaN if there is none.
        attention: `‖Â - A‖ / ‖A‖` of the attention matrix, Frobenius.
        output: `‖Â V - A V‖ / ‖A V‖`.
        mean_of_values: The same with uniform attention: what no attention at all
            would do. (Zero output would be 1.)
        negative: Fraction of estimates below 0.
        kolmogorov_smirnov: Largest distance between the distribution functions of
            Â's and A's rows over key positions, mean over rows.
        wasserstein: Their mean distance, mean over rows: the 1-d Wasserstein metric
            with keys at equal distances on [0, 1].
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
        """The mean of several; of `measured` and `predicted` over all covered pairs."""
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
    """Estimated kernel values of one sequence: `values · exp(log_scale)`.

    Attributes:
        values: Array of shape `(K, T, S)`.
        log_scale: Array of shape `(K, T, 1)`, each row's largest.
        stats: What the map's `statistics` gave.
    """

    values: np.ndarray
    log_scale: np.ndarray
    stats: object


def estimate(feature_map, sequence):
    """Estimated kernel values of one sequence.

    Args:
        feature_map: A built `FeatureMap`.
        sequence: A `keras_rfattn.layers.recording.Sequence`.

    Returns:
        An `Estimate`.

    Raises:
        ValueError: If the map is of polynomial attention, which is no estimate of
            softmax.
    """
    if feature_map.is_preparing:
        raise ValueError(
            "Errors against softmax attention are not measured for maps that "
            "normalize queries and keys first. Received: feature_map="
            f"{feature_maps.name_of(feature_map)!r}, of polynomial attention."
        )
    query, key = (
        ops.convert_to_tensor(x.swapaxes(0, 1)[None].astype("float32"))
        for x in (sequence.query, sequence.key)
    )
    stats = feature_map.statistics(query, key, causal=sequence.causal)
    q, q_scale = _parts(feature_map.query_features(query, stats))
    k, k_scale = _parts(feature_map.key_features(key, stats))
    # Per feature the largest key, then per query the largest feature.
    top = k_scale.max(axis=1, keepdims=True)
    rows = q_scale + top
    shift = rows.max(axis=-1, keepdims=True)
    q, k = q * np.exp(rows - shift), k * np.exp(k_scale - top)
    return Estimate(q @ k.swapaxes(-1, -2), shift, stats)


def _parts(features):
    """Values and exponents as `(K, n, M)` arrays."""
    features = features.dense()
    return _array(features.ones_or_values()), _array(features.spread_scale())


def _array(x):
    return keras.ops.convert_to_numpy(x)[0].swapaxes(0, 1).astype("float64")


def is_covered(feature_map, query, key, head):
    """`(T, S)`: for which pairs `‖x + s y‖² <= log m`."""
    x, y = feature_map.meets(query, key, head)
    y = feature_map.sign(head) * y
    squares = np.sum(x * x, -1)[:, None] + np.sum(y * y, -1) + 2 * x @ y.T
    return squares <= np.log(feature_map.num_features or feature_map.output_dim)


def visibility(sequence):
    """`(T · G, S)`: which keys each query sees."""
    rows, keys = sequence.query.shape[1], sequence.key.shape[1]
    if not sequence.causal:
        return np.ones((rows, keys), bool)
    visible = np.tri(keys, dtype=bool)
    if sequence.prefix is not None:
        visible |= sequence.prefix
    return np.repeat(visible, rows // keys, axis=0)


def head_errors(feature_map, sequences, head, estimates=None):
    """`HeadErrors` of one key/value head.

    Args:
        feature_map: A built `FeatureMap`.
        sequences: List of `Sequence`.
        head: Which key/value head.
        estimates: What `estimate` gives for each sequence, if at hand.

    Returns:
        `HeadErrors`, the mean over sequences.
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
    """The first four fields of `HeadErrors`, for `ratio = estimate / kernel`."""
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
