"""Measures and predicts the errors of softmax estimates, in NumPy float64."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.kernels import variance

# Number of pairs whose variance is computed at once, which limits memory.
SLICE = 2**15
# Added to exponents, so that products of features that differ by a thousand in their
# exponents are still represented in float64.
LIFT = 300.0


class HeadErrors(NamedTuple):
    """Relative errors of one head on some sequences; 0 is exact.

    A is the softmax attention matrix, Â its estimate and V the values. A pair is a
    query and a key that it sees, and m is the number of random vectors. The first four
    fields are NaN for maps whose kernel is not softmax.

    Attributes:
        kernel: Median over pairs of `|estimate / kernel - 1|`.
        covered: Fraction of pairs x, y for which m vectors are enough: those with
            `‖x + s y‖² <= log m` (s = -1 for trigonometric features, else 1), which
            bounds the relative variance of positive features by 1, and of a variance of
            at most 1 by the closed form, where there is one.
        measured: Root mean square of `estimate / kernel - 1` over covered pairs; NaN if
            no pair is covered.
        predicted: The value of `measured` that the closed form predicts; NaN if no pair
            is covered or there is no closed form.
        attention: `‖Â - A‖ / ‖A‖`, in the Frobenius norm.
        output: `‖Â V - A V‖ / ‖A V‖`.
        mean_of_values: The error `output` of uniform attention. (That of zero output
            is 1.)
        negative: Fraction of estimates below 0.
    """

    kernel: float
    covered: float
    measured: float
    predicted: float
    attention: float
    output: float
    mean_of_values: float
    negative: float

    @classmethod
    def mean(cls, errors):
        """Averages several `HeadErrors`."""
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
    """Estimated kernel values of one sequence, `values · exp(log_scale)`."""

    values: np.ndarray  # (K, T, S), 0 for keys that a row does not see
    log_scale: np.ndarray  # (K, T, 1), the largest exponent of each row
    bound: object  # the map, bound to the sequence


def estimate(feature_map, sequence):
    """Estimates the kernel for all pairs of queries and keys of one sequence."""
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
    bound = feature_map.bind(query, key, causal=sequence.causal)
    q, q_scale = _parts(bound.query_features(query))
    k, k_scale = _parts(bound.key_features(key))
    # Each query and each key is relative to its own largest exponent. A maximum over
    # keys would include keys that a row does not see.
    q_top, k_top = (x.max(axis=-1, keepdims=True) - LIFT for x in (q_scale, k_scale))
    products = q * np.exp(q_scale - q_top) @ (k * np.exp(k_scale - k_top)).mT
    products = np.where(visibility(sequence), products, 0)
    with np.errstate(divide="ignore"):
        exponents = np.log(np.abs(products)) + q_top + k_top.mT
    shift = np.maximum(exponents.max(axis=-1, keepdims=True), -1e300)  # if all are 0
    return Estimate(np.sign(products) * np.exp(exponents - shift), shift, bound)


def _parts(features):
    """Returns the values and exponents of n tokens as arrays `(K, n, M)`."""
    features = features.dense()
    values, scale = _array(features.ones_or_values()), _array(features.log_scale)
    return values, np.broadcast_to(scale, values.shape)


def _array(x):
    return ops.convert_to_numpy(x)[0].swapaxes(0, 1).astype("float64")


def head_errors(feature_map, sequences):
    """Measures the errors of each key/value head of one layer."""
    estimates = [estimate(feature_map, sequence) for sequence in sequences]
    return [
        HeadErrors.mean(
            [
                _errors(feature_map, sequence, head, estimated)
                for sequence, estimated in zip(sequences, estimates, strict=True)
            ]
        )
        for head in range(feature_map.num_heads)
    ]


def _errors(feature_map, sequence, head, estimated):
    """Returns the `HeadErrors` of one head on one sequence."""
    query, key, value = sequence.query[head], sequence.key[head], sequence.value[head]
    values, shift = estimated.values[head], estimated.log_scale[head]
    visible = visibility(sequence)
    products = sequence.logit_scale * query @ key.T
    logits = products
    if sequence.softmax is not None:
        exact_query, exact_key = (x[head] for x in sequence.softmax)
        logits = exact_query @ exact_key.T
    if sequence.soft_cap is not None:
        logits = sequence.soft_cap * np.tanh(logits / sequence.soft_cap)
    logits = np.where(visible, logits, -np.inf)
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)

    total = values.sum(-1, keepdims=True)
    weights = values / np.where(total == 0, 1, total)
    uniform = visible / visible.sum(-1, keepdims=True)
    output = attention @ value

    with np.errstate(over="ignore", invalid="ignore"):
        ratio = values * np.exp(shift - products)
    return HeadErrors(
        *_kernel_errors(estimated.bound, head, query, key, ratio, visible),
        attention=_relative_error(weights, attention),
        output=_relative_error(weights @ value, output),
        mean_of_values=_relative_error(uniform @ value, output),
        negative=np.mean(values[visible] < 0),
    )


def _relative_error(approximate, exact):
    return np.linalg.norm(approximate - exact) / np.linalg.norm(exact)


def _kernel_errors(feature_map, head, query, key, ratio, visible):
    """Returns four fields of `HeadErrors`, `kernel` to `predicted`."""
    if feature_map.kernel != "softmax":
        return np.nan, np.nan, np.nan, np.nan
    covered = visible & _is_covered(feature_map, query, key, head)
    rows, keys = np.nonzero(covered)
    predict = predicted_variance(feature_map, head)
    variances = np.full(len(rows), np.nan)
    if predict is not None:
        variances = predict(query[rows], key[keys])
        too_large = variances > 1
        covered[rows[too_large], keys[too_large]] = False
        variances = variances[~too_large]
    measured = predicted = np.nan
    if covered.any():
        measured = np.sqrt(np.mean((ratio[covered] - 1) ** 2))
        predicted = np.sqrt(np.mean(variances))
    median = np.median(np.abs(ratio[visible] - 1))
    return median, covered.sum() / visible.sum(), measured, predicted


def _is_covered(feature_map, query, key, head):
    """Returns for which pairs `‖x + s y‖² <= log m`, as booleans `(T, S)`."""
    x, y = feature_map.before_projection(query, key, head)
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


def predicted_variance(feature_map, head):
    """Returns `(queries, keys) -> variance / kernel²`, or `None`: the closed form."""
    # It is exact for independent vectors, and for orthogonal vectors of generalized
    # exponential features with one A; others are treated as independent.
    moment = feature_map.log_moment(head)
    if moment is None:
        return None
    covariance = feature_map.relative_covariance(head)

    def relative(query, key):
        x, y = feature_map.before_projection(query, key, head)
        with np.errstate(over="ignore"):
            log_variance = variance.log_variance(moment(x, y), x, y)
            total = np.exp(log_variance - 2 * np.sum(x * y, -1))
        if covariance is not None:
            total = np.maximum(total + covariance(x, y), 0)
        return total / feature_map.num_features

    def in_slices(query, key):
        shape = query.shape[:-1]
        query, key = (v.reshape(-1, v.shape[-1]) for v in (query, key))
        starts = range(0, len(query), SLICE)
        parts = [relative(query[i : i + SLICE], key[i : i + SLICE]) for i in starts]
        return np.concatenate(parts).reshape(shape) if parts else np.zeros(shape)

    return in_slices
