import pytest
from keras import ops

from keras_rfattn.ops import Features, quadratic
from tests import helpers as h


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", h.FORMS)
def test_is_the_definition(name, causal):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["scattered"]
    features = h.featurize(feature_map, x.query, x.key)
    actual = h.compiled(quadratic, causal=causal)(
        *features, ops.convert_to_tensor(x.value), ops.convert_to_tensor(mask)
    )
    expected = h.reference(*features, x.value, mask, causal)
    h.assert_matches(feature_map, actual, expected)


def test_common_exponents_cancel():
    x = h.problem(size=0.1)
    query, key = h.featurize(h.build("favorplus"), x.query, x.key)
    query = query.dense()
    call = h.compiled(quadratic)
    expected = call(query, key, ops.convert_to_tensor(x.value))
    shifted = Features(None, query.log_scale + 1000.0)
    actual = call(shifted, key, ops.convert_to_tensor(x.value))
    # A thousand leaves four decimals of a float32 exponent.
    h.assert_close(actual, expected, rtol=1e-3)
