import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.models import Plan
from tests.marks import SLOW_ON_JAX, slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once

WIDTHS = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def data():
    return [m.tokens(8)[i : i + 1] for i in range(4)]


def cost(width):
    """Of a layer: `2 H m + 2 M V` for each head, M = m."""
    return m.HEADS * 2 * width * 2 * (m.DIM // m.HEADS)


def recommend(data, budget, **arguments):
    model = m.softmax_model()
    arguments = {"widths": WIDTHS, "candidates": ["favorpp_dense"]} | arguments
    found = diagnostics.recommend(
        model, data, budget=budget, verbose=0, length=1000, **arguments
    )
    return model, found


@slow_on_jax
@pytest.mark.parametrize("width", [8, 16])
def test_it_is_never_worse_than_one_width_and_within_the_budget(data, width):
    _, found = recommend(data, 2 * cost(width))
    assert found.multiplications <= found.budget
    assert found.one_width.multiplications <= found.budget
    assert found.error <= found.one_width.error
    assert found.error < found.control or found.one_width.error >= found.control
    text = str(found)
    assert "attention_1" in text and "one width" in text and "mean of V" in text


@slow_on_jax
def test_softmax_is_kept_where_it_is_cheap(data):
    model = m.softmax_model()
    found = diagnostics.recommend(
        model, data, budget=2 * cost(32), length=4, widths=WIDTHS, verbose=0
    )
    assert found.error == 0
    assert {x.mechanism for x in found.layers.values()} == {"softmax"}
    with pytest.raises(ValueError, match="keeps every layer softmax"):
        keras_rfattn.replace_attention(model, found)


def test_replace_attention_takes_the_answer(data):
    model, found = recommend(data, cost(8) + cost(16))
    keras_rfattn.replace_attention(model, found)
    for path, choice in found.layers.items():
        feature_map = model.get_layer(path).feature_map
        assert feature_map.num_features == choice.num_features
    widths = {x.num_features for x in found.layers.values()}
    assert len(widths) == 2, widths


def test_plans_name_layers():
    model = m.softmax_model()
    plan = Plan({"attention_0": "elu", "*": None})
    keras_rfattn.replace_attention(model, plan)
    rows = {x.path: x.mechanism for x in keras_rfattn.describe_attention(model).rows}
    assert rows == {"attention_0": "elu", "attention_1": "softmax"}
    before = m.softmax_model()
    with pytest.raises(ValueError, match="Received: 'attention_7', which matches none"):
        keras_rfattn.replace_attention(before, Plan({"attention_7": "elu"}))
    with pytest.raises(ValueError, match="`maps` must be a dict"):
        Plan({})
    assert np.all([not hasattr(x, "feature_map") for x in before.layers])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"budget": 10.0, "error": 0.1}, "and not both"),
        ({}, "and not both"),
        ({"budget": -1}, "`budget` must be a positive number"),
        pytest.param({"budget": 1}, "must allow the narrowest", marks=SLOW_ON_JAX),
    ],
)
def test_refusals(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        diagnostics.recommend(m.softmax_model(), data, verbose=0, **arguments)
