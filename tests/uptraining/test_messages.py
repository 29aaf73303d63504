"""What errors say of data that is not what it should be."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.uptraining.batches import Batches
from tests.marks import slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once

X = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")

WRONG_DATA = {
    "one text": ("some text", r"Received: one text.*`data=\[text\]`"),
    "bytes": (b"some text", r"Received: one text.*`data=\[text\]`"),
    "scalar": (np.array("text"), "Received: one text"),
    "empty list": ([], "Received: an empty list. It must hold at least one row"),
    "empty tuple": ((), "Received: an empty tuple"),
    "empty dict": ({}, "Received: an empty dict"),
    "number": (5, "Received: data=5 of type int"),
    "lists": ([[1, 2], [3, 4]], "Received: a list of lists. Pass an array"),
    "ragged": (np.array([[1, 2], [3]], object), "an array of objects.*Pad rows"),
    "no text": (["a", None], "None between texts. Drop it"),
    "empty stream": (lambda: iter(()), "at least one batch. Received: none."),
    "empty generator": ((x for x in ()), "at least one batch. Received: none."),
    "stream of texts": (lambda: iter(["a", "b"]), "'a'. A batch must be an array"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_data_that_holds_no_batches(name):
    data, message = WRONG_DATA[name]
    with pytest.raises(ValueError, match=message):
        Batches(data, 2, 0, preprocessor=np.asarray)(0)


def test_a_tuple_of_texts_is_texts():
    assert set(Batches(("a", "b"), 2, 0, np.asarray)(0)) == {"a", "b"}


def linear(feature_map="favorpp"):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs))
    return keras_rfattn.replace_attention(model, feature_map, seed=0)


WRONG_BATCHES = {
    "dict": ({"x": X}, r"a dict of 'x': an array.*one batch. Put it into.*`\[data\]`"),
    "text": ("text", "which is text. Turn texts into tokens"),
    "texts": (["a", "b"], "Turn texts into tokens first"),
    "array of texts": (np.array(["a", "b"]), "which is text"),
    "function": (lambda: [X], "a function. Call it"),
    "number": (5, "data=5 of type int"),
    "none": (None, "data=None"),
    "one batch": (X, r"one row of the array `data`.*`\[data\]`"),
    "labelled": ([(X, np.zeros(3))], "Remove labels and weights"),
    "shape": ([X[:, :5]], r"the model, an array of shape \(None, 6, 8\). Received"),
    "objects": ([np.array([[1], [1, 2]], object)], "an array of objects of shape"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_batches_that_are_none(name):
    data, message = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=message) as error:
        keras_rfattn.calibrate(linear(), data, verbose=0)
    if name != "texts" and "text" not in name:
        assert "tokens" not in str(error.value)


def test_an_error_of_the_model_is_not_one_of_the_data():
    model = linear()

    def broken(*args, **kwargs):
        raise ZeroDivisionError("of the map")

    model.get_layer("attention").feature_map.bind = broken
    with pytest.raises(ValueError, match="(?s)ZeroDivision.*of the map") as error:
        keras_rfattn.calibrate(model, [X], exact=False, verbose=0)
    assert "`model` must be able to run" in str(error.value)
    assert "Each batch" not in str(error.value)


def backbone(**arguments):
    hub = pytest.importorskip("keras_hub")
    model = hub.models.BertBackbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=8, max_sequence_length=16, **arguments,
    )  # fmt: skip
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


@slow_on_jax
def test_texts_on_a_backbone_name_the_preprocessor_that_fits():
    hub = pytest.importorskip("keras_hub")
    bert = backbone()
    inputs = bert.input
    pooled = keras.Model(inputs, bert(inputs)["pooled_output"])
    llama = hub.models.LlamaBackbone(
        vocabulary_size=20, num_layers=1, num_query_heads=2, num_key_value_heads=1,
        hidden_dim=8, intermediate_dim=8,
    )  # fmt: skip
    keras_rfattn.replace_attention(llama, "favorpp_learned", num_features=4, seed=0)
    for model, name in (
        (bert, "BertTextClassifierPreprocessor"),
        (pooled, "BertTextClassifierPreprocessor"),
        (llama, "LlamaCausalLMPreprocessor"),
    ):
        with pytest.raises(ValueError, match=f"`keras_hub.models.{name}`"):
            m.uptrain(model, ["a text", "another"])
    with pytest.raises(ValueError, match="LlamaCausalLMPreprocessor"):
        keras_rfattn.calibrate(llama, [["a text"]], verbose=0)


@slow_on_jax
def test_more_tokens_than_positions_name_what_extends_them():
    def inputs(length):
        ids = np.ones((4, length), "int32")
        return {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": ids}

    message = (
        "has 20 tokens, and the model has positions for 16 .`max_sequence_length`."
        r".*keras_rfattn.extend_positions\(model, 20\)"
    )
    with pytest.raises(ValueError, match=message):
        m.uptrain(backbone(), inputs(20), batch_size=4)

    def batches():
        for length in (8, 8, 8, 8, 20):
            yield inputs(length)

    with pytest.raises(Exception) as error:
        m.uptrain(backbone(), batches, steps=6, stages="attention")
    assert "extend_positions(model, 20)" in "".join(error.value.__notes__)
