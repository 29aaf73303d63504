import dataclasses

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options
from tests import helpers as h
from tests.diagnostics.test_attribute import first_output
from tests.marks import slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once


@slow_on_jax
def test_each_layer_is_softmax_again_and_alone_linear():
    data = m.tokens()
    model = m.linear_model("favorpp", num_features=8, window=4)
    found = diagnostics.sensitivity(model, data, first_output)
    assert [(x.path, x.head) for x in found.parts] == [
        ("attention_0", None), ("attention_1", None),
    ]  # fmt: skip
    first, second = found.parts
    for part, other in ((first, second), (second, first)):
        half = m.softmax_model()
        keras_rfattn.replace_attention(
            half, "favorpp", num_features=8, seed=0, window=4, exclude=part.path
        )
        h.assert_close(part.restored, first_output(half, data))
        assert part.restored == other.alone
    h.assert_close(found.as_it_is, first_output(model, data), 1e-6)
    h.assert_close(found.softmax, first_output(m.softmax_model(), data))
    numbers = [found.as_it_is, found.softmax, first.restored, first.alone]
    assert len(set(np.round(numbers, 6))) == 4
    assert all(part.path in str(found) for part in found.parts)
    gaps = [abs(part.alone - found.softmax) for part in found.parts]
    assert found.softmax_layers(1) == [found.parts[int(np.argmax(gaps))].path]
    assert found.softmax_layers(2) == [first.path, second.path]
    for count in (0, 3, True):
        with pytest.raises(ValueError, match="`count` must be from 1 to"):
            found.softmax_layers(count)
    assert model.get_layer("attention_0").recorder is None


@slow_on_jax
def test_each_head():
    data, model = m.tokens(), m.softmax_model()
    keras_rfattn.replace_attention(
        model, "favorpp", num_features=8, seed=0, include="attention_1"
    )
    found = diagnostics.sensitivity(model, data, first_output, heads=True)
    first, second = found.parts
    assert (first.head, second.head) == (0, 1)
    # Of two heads one is softmax again where the other is alone linear.
    h.assert_close(first.restored, second.alone, 1e-6)
    h.assert_close(second.restored, first.alone, 1e-6)
    numbers = [found.as_it_is, found.softmax, first.restored, first.alone]
    assert len(set(np.round(numbers, 6))) == 4
    assert "attention_1, head 1" in str(found)
    gaps = [abs(x.restored - found.softmax) for x in found.parts]
    best = int(np.argmin(gaps))
    assert found.softmax_heads(1) == {"attention_1": [best]}
    plan = Plan({"attention_1": ("favorpp", Options(softmax_heads=[best]))})
    kept = keras_rfattn.replace_attention(
        m.softmax_model(), plan, num_features=8, seed=0
    )
    h.assert_close(first_output(kept, data), found.parts[best].restored, 1e-5)
    assert found.softmax_heads(2) == {"attention_1": [0, 1]}
    for count in (0, 3):
        with pytest.raises(ValueError, match="`count` must be from 1 to .*heads, 2"):
            found.softmax_heads(count)
    with pytest.raises(ValueError, match=r"Use `sensitivity\(..., heads=True\)`"):
        dataclasses.replace(found, parts=()).softmax_heads(1)


def test_refusals():
    with pytest.raises(ValueError, match="has no linear attention"):
        diagnostics.sensitivity(m.softmax_model(), None, first_output)
    with pytest.raises(TypeError, match="`metric` must be a function"):
        diagnostics.sensitivity(m.linear_model(), None, "accuracy")
    model = m.linear_model()
    with pytest.raises(ZeroDivisionError):
        diagnostics.sensitivity(model, None, lambda model, data: 1 / 0)
    assert model.get_layer("attention_0").recorder is None


def test_heads_are_those_of_keys_and_values():
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 8))
    layer = keras.layers.GroupQueryAttention(4, 4, 2, name="grouped")
    softmax = keras.Model(x, layer(x, x))
    data = 3 * np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    weights = softmax.get_weights()
    arguments = {"num_features": 8, "seed": 0}
    keras_rfattn.replace_attention(softmax, "favorplus", **arguments)
    found = diagnostics.sensitivity(softmax, data, first_output, heads=True)
    assert [part.head for part in found.parts] == [0, 1]
    keras_rfattn.restore_attention(softmax)
    softmax.set_weights(weights)
    for part in found.parts:
        kept = [part.head]
        keras_rfattn.replace_attention(
            softmax, "favorplus", softmax_heads=kept, **arguments
        )
        h.assert_close(first_output(softmax, data), part.restored, 1e-5)
        keras_rfattn.restore_attention(softmax)
    numbers = [found.as_it_is, found.softmax, *(x.restored for x in found.parts)]
    assert len(set(np.round(numbers, 6))) == 4
