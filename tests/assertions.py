"""Comparisons that name the index of the worst number, and that refuse zeros."""

import keras
import numpy as np
from keras import ops

# Tolerances of narrow dtypes, which NumPy may lack: `to_numpy` makes them float32.
NARROW = {"bfloat16": 1e-2, "float16": 2e-3}


def to_numpy(x):
    """A NumPy array, float32 at least."""
    if isinstance(x, (np.ndarray, np.generic, float, int)):
        return np.asarray(x)
    if keras.backend.standardize_dtype(x.dtype) in NARROW:
        x = ops.cast(x, "float32")
    return np.asarray(ops.convert_to_numpy(x))


def assert_close(actual, expected, rtol=1e-5):
    """Largest difference over largest magnitude; zeros and NaN never pass."""
    actual, expected = _finite_pair(actual, expected)
    largest = np.max(np.abs(expected))
    assert largest > 0, "nothing to compare with: expected is zero"
    assert rtol < 0.5, f"zeros would nearly pass a tolerance of {rtol}"
    errors = np.abs(actual - expected) / largest
    assert np.max(errors) <= rtol, (
        f"relative error {np.max(errors):.2e} > {rtol:.2e} at index {worst(errors)}"
    )


def assert_gradients_close(actual, expected, rtol, all_clear=True):
    """Gradients for several arrays, each within `rtol` of the largest of all.

    Nearly uniform attention hardly depends on queries and keys: their gradients are
    small differences of terms as large as the values'.

    Args:
        actual: Gradients, as `gradients` gives them.
        expected: Likewise.
        rtol: Relative to the largest entry of all of `expected`.
        all_clear: Whether zeros must fail for every array; else for one at least.
    """
    pairs = [_finite_pair(a, e) for a, e in zip(actual, expected, strict=True)]
    largest = [np.max(np.abs(e)) for _, e in pairs]
    tolerance = rtol * max(largest)
    clear = [x > 3 * tolerance for x in largest]
    assert all(clear) if all_clear else any(clear), "zeros would nearly pass"
    for i, (a, e) in enumerate(pairs):
        errors = np.abs(a - e) / max(largest)
        assert np.max(errors) <= rtol, (
            f"relative error {np.max(errors):.2e} > {rtol:.2e} in gradient {i} "
            f"at index {worst(errors)}"
        )


def assert_rows_close(actual, expected, conditioning, size, rtol=1e-5):
    """Row by row, within `rtol · size · conditioning`; zeros never pass.

    Args:
        actual: `(..., V)`.
        expected: `(..., V)`.
        conditioning: `(...)`: `Σ|w| / |Σ w|` of each row, see `Reference`.
        size: Largest magnitude of the values.
        rtol: What a row of nonnegative weights is held to.
    """
    actual, expected = _finite_pair(actual, expected)
    tolerance = rtol * size * conditioning
    rows = np.max(np.abs(expected), axis=-1)
    seen = rows > 0
    assert np.any(seen), "nothing to compare with: expected is zero"
    refused = np.mean(rows[seen] > 2 * tolerance[seen])
    assert refused > 0.9, f"zeros would pass in {1 - refused:.0%} of the rows"
    error = np.max(np.abs(actual - expected), axis=-1)
    ratios = np.where(seen, error / tolerance, error > 0)
    assert np.max(ratios) <= 1, (
        f"row error {np.max(ratios):.2f} times its tolerance at index {worst(ratios)}"
    )


def assert_same(actual, expected):
    """Equality bit by bit, of something that is not zero everywhere."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert np.any(expected != 0), "nothing to compare with: expected is zero"
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    differ = ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    assert not np.any(differ), (
        f"{np.mean(differ):.1%} of the numbers differ; the first at index "
        f"{worst(differ)}: {actual[differ][0]} is not {expected[differ][0]}"
    )


def worst(errors):
    """Returns the index of the largest error; NaN counts as the largest."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))


def _finite_pair(actual, expected):
    actual = to_numpy(actual).astype("float64")
    expected = to_numpy(expected).astype("float64")
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    assert np.all(np.isfinite(expected)), "expected is not finite"
    assert np.all(np.isfinite(actual)), "actual is not finite"
    return actual, expected
