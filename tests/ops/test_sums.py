import numpy as np
import pytest
from keras import ops

from keras_rfattn.backend import representable
from keras_rfattn.ops import Features, layout, masks
from keras_rfattn.ops import sums as f
from tests import helpers as h


def sums(name, x, mask=None):
    _, key = h.featurize(h.build(name), x.query, x.key)
    key, mask = layout.heads_first(key, h.KV_HEADS), masks.heads_mask(mask)
    value = layout.split_heads(ops.convert_to_tensor(x.value), h.KV_HEADS)
    return f.summarize(*f.admit(key, value, mask), mask)


@pytest.mark.parametrize("name", h.FORMS)
def test_sums_of_two_sets_are_the_sums_of_both(name):
    x, mask = h.problem(), np.ones((h.BATCH, h.LENGTH), bool)
    first = mask.copy()
    first[:, 20:] = False
    first, second = ops.convert_to_tensor(first), ops.convert_to_tensor(~first)
    merged = f.merge_sums(sums(name, x, first), sums(name, x, second))
    for actual, expected in zip(merged, sums(name, x), strict=True):
        h.assert_close(actual, expected)


@pytest.mark.parametrize("name", h.FORMS)
def test_readings_of_two_sets_add_up(name):
    x = h.problem()
    query, _ = h.featurize(h.build(name), x.query, x.key)
    query = layout.heads_first(query, h.KV_HEADS)
    first = np.ones((h.BATCH, h.LENGTH), bool)
    first[:, 20:] = False

    def read(mask):
        return f.read(sums(name, x, mask), query, "float32")

    parts = [read(ops.convert_to_tensor(m)) for m in (first, ~first)]
    actual = f.normalize(f.combine(*parts), query)
    expected = f.normalize(read(None), query)
    h.assert_close(actual, expected, 1e-3 if query.is_signed else 1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_guard_of_a_signed_denominator(sign):
    reading = f.Reading(
        shift=None,
        numerator=ops.convert_to_tensor(np.float32([[1.0], [1.0]])),
        denominator=ops.convert_to_tensor(np.float32([sign * 1e-9, sign * 0.5])),
        bound=ops.convert_to_tensor(np.float32([2.0, 2.0])),
    )
    expected = [[sign / (f.GUARD * 2)], [sign * 2]]
    output = h.to_numpy(f.normalize(reading, Features(0, 0)))
    np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_guard_leaves_positive_denominators_alone():
    reading = f.Reading(
        shift=None,
        numerator=ops.convert_to_tensor(np.float32([[1e-9], [0.0]])),
        denominator=ops.convert_to_tensor(np.float32([1e-9, 0.0])),
        bound=ops.convert_to_tensor(np.float32([1e-9, 0.0])),
    )
    output = h.to_numpy(f.normalize(reading, Features(None, 0)))
    np.testing.assert_allclose(output, [[1.0], [0.0]], rtol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_are_split_and_merged_back(kv_heads):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype("float32")
    split = layout.split_heads(ops.convert_to_tensor(x), kv_heads)
    groups = 4 // kv_heads
    assert tuple(split.shape) == (2, kv_heads, 3 * groups, 5)
    # Query head n belongs to key head n // groups, beside its token.
    h.assert_same(split[:, 0, groups : 2 * groups], x[:, 1, :groups])
    h.assert_same(layout.merge_heads(split, 4, 3), x)


def test_only_float16_cannot_hold_features():
    for dtype, expected in (("float16", "float32"), ("bfloat16", "bfloat16")):
        value = representable(ops.ones((1,), dtype=dtype))
        assert expected in str(value.dtype)
