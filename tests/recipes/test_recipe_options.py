"""Heads that stay softmax in a recipe, after maps with other such heads were loaded."""

import pytest

import keras_rfattn
from keras_rfattn.models.survey import survey
from recipes.common import options
from tests.models import families

pytestmark = pytest.mark.once


def linear_llama(softmax_heads):
    """Returns a model of two layers with two key/value heads, and its layers' paths."""
    model, _ = families.build("llama")
    first, second = (site.path for site in survey(model))
    heads = {path: softmax_heads[i] for i, path in enumerate((first, second))}
    keras_rfattn.replace_attention(model, "favorplus", softmax_heads=heads)
    return model, first, second


def softmax_heads(model):
    """Returns softmax heads of each layer, `None` for one without linear heads."""
    return [
        site.layer.options.softmax_heads if site.is_linear else None
        for site in survey(model)
    ]


def test_heads_of_a_choice_replace_those_of_loaded_maps():
    model, first, second = linear_llama([[0], [1]])
    options.change(model, softmax_heads=())
    options.restore(model, {})
    assert softmax_heads(model) == [(), ()]
    options.restore(model, {first: [1]})
    assert softmax_heads(model) == [(1,), ()]


def test_layers_without_linear_heads_must_stay_so():
    model, first, second = linear_llama([[0, 1], [1]])
    options.change(model, softmax_heads=())
    with pytest.raises(SystemExit, match=rf"heads in {first}.*\[1\] stay"):
        options.restore(model, {first: [1], second: [0]})
    with pytest.raises(SystemExit, match=rf"heads in {first}.*\[\] stay"):
        options.restore(model, {})
    assert softmax_heads(model) == [None, ()]
    options.restore(model, {first: [0, 1], second: [0]})
    assert softmax_heads(model) == [None, (0,)]
