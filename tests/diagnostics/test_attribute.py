import numpy as np
import pytest

from keras_rfattn import diagnostics
from tests import helpers as h
from tests.marks import slow_on_jax
from tests.uptraining import models as m


def first_output(model, data):
    """A metric that tells functions apart."""
    return model.predict(data, verbose=0)[:, :, 0].std()


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("causal", [False, True])
def test_a_model_is_evaluated_in_parts(causal):
    data = m.tokens()
    softmax = m.softmax_model(causal=causal)
    wanted = first_output(softmax, data)
    zero = m.softmax_model(causal=causal)
    for weight in zero.weights:
        # Values of 0: attention puts out its bias, as it does when it is 0 itself.
        if "/value/" in weight.path:
            weight.assign(0 * weight)
    arguments = {"causal": causal, "num_features": 16}
    model = m.linear_model("favorpp", window=4, **arguments)
    found = diagnostics.attribute(model, data, first_output)
    h.assert_close(found.softmax, wanted)
    h.assert_close(found.no_attention, first_output(zero, data))
    h.assert_close(found.as_it_is, first_output(model, data), 1e-6)
    features = m.linear_model("favorpp", **arguments)
    h.assert_close(found.features_only, first_output(features, data))
    numbers = list(vars(found).values())
    assert len(set(np.round(numbers, 6))) == len(numbers) == 6
    assert "features carry" in str(found)
    expected = (found.as_it_is - found.window_only) / (wanted - found.window_only)
    assert found.share_of_features == pytest.approx(expected, rel=1e-4)
    assert all(x.recorder is None for x in model.layers if hasattr(x, "feature_map"))


def test_a_metric_returns_a_number():
    model, data = m.linear_model(), m.tokens()
    with pytest.raises(ValueError, match="`metric` must return a number.*None"):
        diagnostics.attribute(model, data, lambda model, data: None)


@slow_on_jax
def test_a_window_over_everything_needs_no_features():
    data = m.tokens()
    model = m.linear_model(window=m.TOKENS)
    found = diagnostics.attribute(model, data, first_output)
    for number in (found.window_only, found.as_it_is):
        h.assert_close(number, found.softmax, 1e-5)
    assert found.features_only != pytest.approx(found.softmax, rel=1e-3)


def test_without_windows_some_are_the_same():
    found = diagnostics.attribute(m.linear_model(), m.tokens(), first_output)
    assert found.window_only == found.no_attention
    assert found.features_only == found.as_it_is


def test_refusals():
    with pytest.raises(ValueError, match="has no linear attention"):
        diagnostics.attribute(m.softmax_model(), None, first_output)
    with pytest.raises(TypeError, match="`metric` must be a function"):
        diagnostics.attribute(m.linear_model(), None, "accuracy")
    model = m.linear_model()
    with pytest.raises(ZeroDivisionError):
        diagnostics.attribute(model, None, lambda model, data: 1 / 0)
    assert model.get_layer("attention_0").recorder is None
