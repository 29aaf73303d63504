"""Errors of an estimate of softmax attention, for one head: NumPy, float64."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps


class HeadErrors(NamedTuple):
    """Errors of one head on some sequences, each relative; 0 is exact.

    Attributes:
        kernel: Median over pairs of `|estimate / kernel - 1|`; without meaning for
            maps of another kernel than softmax.
        predicted: What the closed form predicts for it: the median of a relative
            standard deviation, times 0.674 (the median of a normal variable's
            magnitude); NaN for maps without a closed form.
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
    predicted: float
    attention: float
    output: float
    mean_of_values: float
    negative: float
    kolmogorov_smirnov: float
    wasserstein: float


def estimate(feature_map, sequence):
    """Estimated kernel values of one sequence, relative to each row's largest shift.

    Args:
        feature_map: A built `FeatureMap`.
        sequence: A `keras_rfattn.layers.recording.Sequence`.

    Returns:
        `(values, log_scale)` of shapes `(K, T, S)` and `(K, T, 1)`: the estimate is
        `values · exp(log_scale)`.

    Raises:
        ValueError: If the map is of polynomial attention, which is no estimate of
            softmax.
    """
    if feature_map.kernel == "polynomial":
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
    return q @ k.swapaxes(-1, -2), shift


def _parts(features):
    """Values and exponents as `(K, n, M)` arrays."""
    log_scale = _array(features.log_scale)
    if features.values is None:
        return np.ones_like(log_scale), log_scale
    values = _array(features.values)
    return values, np.broadcast_to(log_scale, values.shape)


def _array(x):
    return keras.ops.convert_to_numpy(x)[0].swapaxes(0, 1).astype("float64")


def visibility(sequence):
    """`(T · G, S)`: which keys each query sees."""
    rows, keys = sequence.query.shape[1], sequence.key.shape[1]
    if not sequence.causal:
        return np.ones((rows, keys), bool)
    return np.repeat(np.tri(keys, dtype=bool), rows // keys, axis=0)


def head_errors(feature_map, sequences, head, estimates=None, predict=None):
    """`HeadErrors` of one key/value head.

    Args:
        feature_map: A built `FeatureMap`.
        sequences: List of `Sequence`.
        head: Which key/value head.
        estimates: What `estimate` gives for each sequence, if at hand.
        predict: `(query, key) -> relative variance` of the estimate, or `None`.

    Returns:
        `HeadErrors`, each the mean over sequences.
    """
    if estimates is None:
        estimates = [estimate(feature_map, s) for s in sequences]
    found = [
        _errors(s, head, values[head], shift[head], predict)
        for s, (values, shift) in zip(sequences, estimates, strict=True)
    ]
    return HeadErrors(*np.mean(found, axis=0))


def _errors(sequence, head, values, shift, predict):
    query, key, value = sequence.query[head], sequence.key[head], sequence.value[head]
    visible = visibility(sequence)
    products = sequence.logit_scale * query @ key.T
    logits = np.where(visible, products, -np.inf)
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)

    with np.errstate(over="ignore"):
        ratio = values * np.exp(shift - products)
    weights = np.where(visible, values, 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    exact, mean = attention @ value, visible @ value / visible.sum(-1, keepdims=True)
    approximate = weights @ value

    positive = np.maximum(weights, 0)
    positive /= np.maximum(positive.sum(-1, keepdims=True), 1e-300)
    gap = np.abs(np.cumsum(positive - attention, axis=-1))
    predicted = np.nan
    if predict is not None:
        predicted = 0.674 * np.median(np.sqrt(predict(query, key)[visible]))
    return (
        np.median(np.abs(ratio[visible] - 1)),
        predicted,
        np.linalg.norm(weights - attention) / np.linalg.norm(attention),
        np.linalg.norm(approximate - exact) / np.linalg.norm(exact),
        np.linalg.norm(mean - exact) / np.linalg.norm(exact),
        np.mean(values[visible] < 0),
        gap.max(-1).mean(),
        gap.mean(),
    )
