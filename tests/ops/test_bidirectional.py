import functools

import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import bidirectional, quadratic
from keras_rfattn.ops.exponents import Exponents
from tests import helpers as h
from tests.marks import first_on_jax


@pytest.mark.parametrize(
    ("name", "lengths"), h.over([(11, 37), (37, 37), (37, 1), (1, 11)])
)
def test_matches_the_definition(name, lengths):
    feature_map = h.build(name)
    x = h.problem(length=lengths[0], key_length=lengths[1])
    features = h.featurize(feature_map, x.query, x.key, causal=False)
    actual = h.attention(feature_map, bidirectional)(*x)
    h.assert_matches(feature_map, actual, h.reference(*features, x.value, causal=False))


@pytest.mark.smoke
@pytest.mark.parametrize("name", h.FORMS)
def test_gradients_match_the_definition(name):
    feature_map, x = h.build(name), h.problem(length=11, key_length=37)
    mask = h.padding_masks()["left"]
    actual, expected = (
        h.gradients(
            lambda *a: h.attention(feature_map, f)(*a, mask),  # noqa: B023
            *x,
        )
        for f in (bidirectional, quadratic)
    )
    h.assert_gradients_close(actual, expected, h.gradient_rtol(feature_map))


@pytest.mark.parametrize(("name", "content"), h.over([np.nan, 1e30]))
def test_hidden_keys_may_hold_anything(name, content):
    feature_map, x = h.build(name), h.problem()
    call = h.attention(feature_map, bidirectional)
    mask = h.padding_masks()["middle"]
    expected = call(*x, mask)
    hidden = ~mask[:, :, None, None]
    key, value = np.where(hidden, content, x.key), np.where(hidden, content, x.value)
    actual = call(x.query, key.astype("float32"), value.astype("float32"), mask)
    h.assert_same(actual, expected)


@pytest.mark.parametrize("name", h.FORMS)
def test_hidden_keys_might_as_well_not_be_there(name):
    feature_map, x = h.build(name), h.problem()
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    mask[:, 3:14] = False
    actual = h.attention(feature_map, bidirectional)(*x, mask)
    short = h.problem(length=h.LENGTH)
    features = h.featurize(feature_map, short.query, short.key[:, mask[0]])
    expected = h.reference(*features, short.value[:, mask[0]], causal=False)
    h.assert_matches(feature_map, actual, expected)


@pytest.mark.parametrize("name", h.AVERAGING_FORMS)
def test_one_visible_key_and_none(name):
    feature_map, x = h.build(name), h.problem()
    mask = np.zeros((h.BATCH, h.LENGTH), bool)
    mask[0, 9] = True
    output = h.to_numpy(h.attention(feature_map, bidirectional)(*x, mask))
    expected = np.repeat(x.value[0, 9], h.HEADS // h.KV_HEADS, axis=0)
    features = h.featurize(feature_map, x.query, x.key)
    conditioning = h.reference(*features, x.value, mask, causal=False).conditioning
    h.assert_rows_close(
        output[0],
        np.broadcast_to(expected, output[0].shape),
        conditioning[0],
        np.max(np.abs(expected)),
    )
    np.testing.assert_array_equal(output[1], 0)


@pytest.mark.parametrize("name", h.FORMS)
def test_query_heads_share_the_head_of_their_group(name):
    x = h.problem()
    groups = h.HEADS // h.KV_HEADS
    features = h.featurize(h.build(name), x.query, x.key)
    value = ops.convert_to_tensor(x.value)
    call = h.compiled(bidirectional)
    actual = call(*features, value)
    query, key = features
    every = key.of_tokens(lambda x: ops.repeat(x, groups, axis=2))
    expected = call(query, every, ops.repeat(value, groups, axis=2))
    h.assert_close(actual, expected)


@functools.cache
def by_exponents(name):
    """`(query, key, value, mask) -> output`, features computed by the algorithm."""

    def attend(query, key, value, mask):
        features = h.featurized(h.build(name), query, key, causal=True)
        return bidirectional(*features, value, mask)

    return h.compiled(attend)


EXPONENTIAL = [name for name in h.NAMES if h.build(name).has_exponents]
MASK = np.ones((h.BATCH, h.LENGTH), bool)
MASK[0, :3], MASK[1, 30:] = False, False


def given(x):
    return [ops.convert_to_tensor(a) for a in (*x, MASK)]


@pytest.mark.parametrize("name", first_on_jax(EXPONENTIAL))
def test_exponents_are_the_same_as_features(name):
    x = h.problem()
    feature_map, (query, key, *others) = h.build(name), given(x)
    features = h.featurized(feature_map, query, key, causal=True)
    assert all(isinstance(x, Exponents) for x in features)
    expected = h.reference(*features, x.value, MASK, causal=False)
    h.assert_matches(feature_map, by_exponents(name)(query, key, *others), expected)
    in_memory = bidirectional(*(x.dense() for x in features), *others)
    h.assert_matches(feature_map, in_memory, expected)
    others[1] = ops.convert_to_tensor(MASK & np.array([[True], [False]]))
    unseen = h.to_numpy(by_exponents(name)(query, key, *others))[1]
    np.testing.assert_array_equal(unseen, 0)
