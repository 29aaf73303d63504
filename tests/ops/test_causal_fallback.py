"""Logits of ten thousand, where a factored product has nothing left to divide by."""

import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import Features, bidirectional, causal, quadratic
from tests import helpers as h
from tests.feature_maps.cases import case

module = sys.modules["keras_rfattn.ops.causal"]
DTYPES = ("float32", "bfloat16", "float16")
# Times the square root of the scale and squared, logits of up to 10⁴.
SIZE = 60.0
# Exponents are then of 10⁴ as well, where float32 numbers lie 10⁻³ apart.
RTOL = 3e-2
SIGNED_RTOL = 2e-3
ALGORITHMS = {
    "causal": (causal, {"block_size": h.BLOCK}),
    "bidirectional": (bidirectional, {}),
}


def test_the_problem_is_as_hard_as_it_says():
    x = h.problem(size=SIZE)
    logits = np.einsum("btkh,bskh->bkts", x.query[:, :, ::2], x.key)
    assert np.max(np.abs(logits)) / h.HEAD_DIM**0.5 > 1e4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", h.FORMS)
def test_matches_the_definition(name, algorithm):
    feature_map, x = h.build(name), h.problem(size=SIZE)
    function, options = ALGORITHMS[algorithm]
    mask = h.padding_masks()["scattered"]
    features = h.featurize(feature_map, x.query, x.key)
    output = h.attention(feature_map, function, **options)(*x, mask)
    expected = h.reference(*features, x.value, mask, causal=function is causal)
    if feature_map.is_positive:
        h.assert_close(output, expected.output, RTOL)
    else:
        h.assert_rows_close(*clear_rows(output, expected, SIGNED_RTOL), SIGNED_RTOL)


def clear_rows(output, expected, rtol):
    """The rows of a signed map that `rtol` tells from zeros: half of them at least."""
    rows = np.max(np.abs(expected.output), axis=-1)
    clear = rows > 3 * rtol * expected.size * expected.conditioning
    assert np.mean(clear) > 0.5
    return (
        h.to_numpy(output)[clear],
        expected.output[clear],
        expected.conditioning[clear],
        expected.size,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "algorithm"),
    [pytest.param(*x.values, "causal", marks=x.marks) for x in h.over(DTYPES)]
    + [(name, DTYPES[0], "bidirectional") for name in h.FORMS],
)
def test_finite_with_gradients(name, algorithm, dtype):
    feature_map, x = h.build(name), h.problem(size=SIZE / case(name).size)
    function, options = ALGORITHMS[algorithm]
    call = h.attention(feature_map, function, **options)
    inputs = [ops.cast(ops.convert_to_tensor(a), dtype) for a in x]
    output = call(*inputs)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    assert np.all(np.isfinite(h.to_numpy(output)))
    found = h.gradients(lambda *a: call(*a), *inputs)
    for gradient in found:
        assert np.all(np.isfinite(gradient))
    assert np.any(found[2] != 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("name", "dtype"), h.over(DTYPES, h.AVERAGING_FORMS))
def test_no_row_loses_its_denominator(name, algorithm, dtype):
    feature_map, x = h.build(name), h.problem(size=SIZE)
    function, options = ALGORITHMS[algorithm]
    call = h.attention(feature_map, function, **options)
    value = ops.cast(np.full_like(x.value, 1.5), dtype)
    query, key = (ops.cast(a, dtype) for a in (x.query, x.key))
    output = h.to_numpy(call(query, key, value))
    rtol = h.NARROW.get(dtype, 1e-5)
    if feature_map.is_positive:
        h.assert_close(output, np.full_like(output, 1.5), rtol)
        return
    features = h.featurize(feature_map, query, key)
    expected = h.reference(*features, value, causal=function is causal)
    h.assert_close(expected.output, np.full_like(output, 1.5))
    h.assert_rows_close(*clear_rows(output, expected, rtol), rtol)


@pytest.mark.parametrize("name", h.FORMS)
def test_is_not_the_mean_of_the_values(name):
    feature_map, x = h.build(name), h.problem(size=SIZE)
    output = h.attention(feature_map, causal, block_size=h.BLOCK)(*x)
    least = 0.5 if case(name).is_sharp else 0.2
    assert h.distance_to_prefix_mean(h.to_numpy(output), x.value) > least


def test_equal_logits_are_the_mean_of_the_values():
    # The control of the test above: its measure does find a mean.
    x = h.problem()
    zeros = np.zeros_like(x.query), np.zeros_like(x.key)
    output = h.attention(h.build("favorplus"), causal, block_size=h.BLOCK)(
        *zeros, x.value
    )
    assert h.distance_to_prefix_mean(h.to_numpy(output), x.value) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", h.AVERAGING_FORMS)
def test_zero_input(name, algorithm):
    function, options = ALGORITHMS[algorithm]
    x = h.problem()
    x = x._replace(query=np.zeros_like(x.query), key=np.zeros_like(x.key))
    call = h.attention(h.build(name), function, **options)
    output = h.to_numpy(call(*x))
    assert np.all(np.isfinite(output)) and np.any(output != 0)
    for gradient in h.gradients(lambda *a: call(*a), *x):
        assert np.all(np.isfinite(gradient))


def steep(rise):
    """Features whose exponents rise along the sequence, and a query for each."""
    generator = np.random.default_rng(5)
    shape = (1, 24, 1, 3)
    key = generator.normal(size=shape) + rise * np.arange(24)[:, None, None]
    query = generator.normal(size=shape)
    value = generator.normal(size=(1, 24, 1, 2)).astype("float32")
    query, key = (
        Features(None, ops.convert_to_tensor(a.astype("float32"))) for a in (query, key)
    )
    return query, key, ops.convert_to_tensor(value)


def fresh(algorithm, **options):
    """Compiled anew: what is patched must not come from a cache."""
    return h.compiled.__wrapped__(algorithm, **options)


def blank(*arguments):
    """What `unbounded_weights` returns, with nothing in it."""
    from keras_rfattn.ops.causal_fallback import unbounded_weights

    weights, shift = unbounded_weights(*arguments)
    return tuple(ops.zeros_like(a) for a in weights), shift


def test_the_fallback_is_taken_beyond_the_span_only(monkeypatch):
    flat, hard = steep(0.0), steep(20.0)
    expected = [h.to_numpy(fresh(causal, block_size=8)(*x)) for x in (flat, hard)]
    monkeypatch.setattr(module, "unbounded_weights", blank)
    h.assert_same(fresh(causal, block_size=8)(*flat), expected[0])
    changed = h.to_numpy(fresh(causal, block_size=8)(*hard)) != expected[1]
    assert np.mean(np.any(changed, axis=-1)) > 0.5


def test_without_the_fallback_rows_are_lost(monkeypatch):
    query, key, value = steep(20.0)
    expected = h.reference(query, key, value).output
    h.assert_close(fresh(causal, block_size=8)(query, key, value), expected, 1e-4)
    monkeypatch.setattr(module, "SPAN", 1e9)
    broken = h.to_numpy(fresh(causal, block_size=8)(query, key, value))
    assert not np.allclose(broken, expected, atol=0.1)


def test_the_fallback_agrees_where_it_is_not_needed(monkeypatch):
    # Nearly every row goes there at this span, and none would at the usual one.
    query, key, value = steep(0.5)
    monkeypatch.setattr(module, "SPAN", 0.01)

    def loss(algorithm, **options):
        function = fresh(algorithm, **options)
        return lambda q, k, v: function(Features(None, q), Features(None, k), v)

    arrays = [h.to_numpy(a) for a in (query.log_scale, key.log_scale, value)]
    h.assert_close(
        fresh(causal, block_size=8)(query, key, value),
        h.reference(query, key, value).output,
    )
    actual = h.gradients(loss(causal, block_size=8), *arrays)
    expected = h.gradients(loss(quadratic, causal=True), *arrays)
    for a, e in zip(actual, expected, strict=True):
        h.assert_close(a, e)


@pytest.mark.parametrize("block_size", [2, 24])
def test_steep_exponents_in_any_block(block_size):
    for rise in (20.0, -20.0, 500.0):
        query, key, value = steep(rise)
        call = h.compiled(causal, block_size=block_size)
        expected = h.reference(query, key, value).output
        h.assert_close(call(query, key, value), expected, 1e-3)
