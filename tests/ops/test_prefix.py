import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options, quadratic
from keras_rfattn.ops.causal import causal
from tests import helpers as h

LENGTH = 13


def masks():
    """A prefix in two pieces; hidden keys in the prefix and after it."""
    prefix, visible = np.zeros((2, LENGTH), bool), np.ones((2, LENGTH), bool)
    prefix[0, :5], prefix[1, 1:3], prefix[1, 6:8] = True, True, True
    visible[0, [2, 9]], visible[1, [0, 6]] = False, False
    return prefix, visible


def definition(feature_map, x, prefix, visible):
    """Each query by itself, over the keys that it sees."""
    query, key = h.featurize(feature_map, x.query, x.key)
    rows, attend_one = [], h.compiled(quadratic)
    for i in range(LENGTH):
        one = query.of_tokens(lambda y: y[:, i : i + 1])  # noqa: B023
        seen = (prefix | (np.arange(LENGTH) <= i)) & visible
        rows.append(attend_one(one, key, ops.convert_to_tensor(x.value), seen))
    return ops.concatenate(rows, axis=1)


@pytest.mark.parametrize("name", h.FORMS)
def test_matches_the_definition(name):
    feature_map, x = h.build(name), h.problem(length=LENGTH)
    prefix, visible = masks()

    def call(query, key, value):
        features = h.featurize(feature_map, query, key)
        return h.compiled(causal, block_size=4)(
            *features, ops.convert_to_tensor(value), ops.convert_to_tensor(visible),
            prefix_mask=ops.convert_to_tensor(prefix),
        )  # fmt: skip

    expected = h.to_numpy(definition(feature_map, x, prefix, visible))
    found = h.to_numpy(call(*x))
    tolerance = 1e-5 if feature_map.is_positive else 1e-3
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    # What is hidden may hold anything.
    value = x.value.copy()
    value[0, 2] = np.nan
    h.assert_same(call(x.query, x.key, value), found)


def test_gradients_match_the_definition():
    feature_map, x = h.build("favorpp"), h.problem(length=LENGTH)
    prefix, visible = masks()
    mask = AttentionMask(visible, causal=True, self_attention=True, prefix_mask=prefix)

    def fast(query, key, value):
        features = h.featurize(feature_map, query, key)
        found = causal(*features, value, visible, 4, prefix_mask=prefix)
        return ops.sum(ops.sin(found))

    def slow(query, key, value):
        same = type(x)(query, key, value)
        return ops.sum(ops.sin(definition(feature_map, same, prefix, visible)))

    found, expected = h.gradients(fast, *x), h.gradients(slow, *x)
    h.assert_gradients_close(found, expected, 1e-4)
    with pytest.raises(ValueError, match=r"prefix-LM.*\['window'\]"):
        attend(*x, feature_map, mask, options=Options(window=4))


def test_softmax_has_the_same_mask():
    from keras_rfattn.ops.kernel_attention import Softmax, exact_attention

    x, (prefix, visible) = h.problem(length=LENGTH), masks()
    seen = (prefix[:, None] | np.tri(LENGTH, dtype=bool)) & visible[:, None]
    groups = x.query.shape[2] // x.key.shape[2]
    logits = np.einsum("btnh,bsnh->bnts", x.query, np.repeat(x.key, groups, 2))
    logits = np.where(seen[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnv->btnv", weights, np.repeat(x.value, groups, 2))
    arrays = [ops.convert_to_tensor(y) for y in (*x, visible, prefix)]
    found = exact_attention(*arrays[:3], Softmax(), arrays[3], True, arrays[4])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), expected, atol=2e-5)
