"""Narrow inputs and values against float32."""

import keras
import pytest
from keras import ops

from keras_rfattn.ops import bidirectional, causal
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import first_on_jax

ALGORITHMS = {
    "causal": (causal, {"block_size": h.BLOCK}),
    "bidirectional": (bidirectional, {}),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("name", "dtype"), h.over(h.NARROW, h.AVERAGING_FORMS))
def test_narrow_values(name, algorithm, dtype):
    # Queries near keys, or a signed map's rows could not tell its output from 0.
    feature_map, x = h.build(name), h.problem(size=0.2)
    function, options = ALGORITHMS[algorithm]
    features = h.featurize(feature_map, x.query, x.key)
    mask = h.padding_masks()["left"]
    output = h.compiled(function, **options)(
        *features, ops.cast(x.value, dtype), ops.convert_to_tensor(mask)
    )
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    expected = h.reference(*features, x.value, mask, causal=function is causal)
    h.assert_matches(feature_map, output, expected, h.NARROW[dtype])


@pytest.mark.parametrize("dtype", first_on_jax(h.NARROW))
@pytest.mark.parametrize("name", h.FORMS)
def test_gradients_of_narrow_inputs(name, dtype):
    feature_map, x = h.build(name), h.problem()
    if not feature_map.is_positive:
        pytest.skip(f"{name} is signed: rounded denominators nearly vanish")
    call = h.attention(feature_map, causal, block_size=h.BLOCK)
    narrow = [ops.cast(a, dtype) for a in x]
    actual = h.gradients(lambda *a: call(*a), *narrow)
    # From the same rounded numbers: what is measured is the arithmetic.
    expected = h.gradients(lambda *a: call(*a), *(h.to_numpy(a) for a in narrow))
    rtol = case(name).narrow * h.NARROW[dtype]
    h.assert_gradients_close(actual, expected, rtol, all_clear=False)
