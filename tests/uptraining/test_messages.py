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
    "one text": ("some text", "Received: data='some text'.*Put one text into a list"),
    "bytes": (b"some text", "Put one text into a list"),
    "scalar": (np.array("text"), "Put one text into a list"),
    "labelled text": (("text", 1), "Received: data='text'"),
    "empty list": ([], r"Received: data=\[\] of type list"),
    "empty tuple": ((), "`data` must be arrays, texts, a dataset"),
    "empty dict": ({}, "`data` must be arrays, texts, a dataset"),
    "number": (5, "Received: data=5 of type int"),
    "lists": ([[1, 2], [3, 4]], "arrays of numbers, padded to one length"),
    "ragged": (np.array([[1, 2], [3]], object), "arrays of numbers, padded"),
    "no text": (["a", None], "or lists of texts"),
    "empty stream": (lambda: iter(()), "at least one batch. Received: none."),
    "empty generator": ((x for x in ()), "at least one batch. Received: none."),
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


NO_ITERABLE = "`data` must be an iterable of batches.*into a list, `.batch.`"
WRONG_BATCHES = {
    "dict": ({"x": X}, NO_ITERABLE),
    "text": ("text", NO_ITERABLE),
    "texts": (["a", "b"], "Turn texts into tokens first"),
    "array of texts": (np.array(["a", "b"]), NO_ITERABLE),
    "function": (lambda: [X], NO_ITERABLE),
    "number": (5, NO_ITERABLE),
    "none": (None, NO_ITERABLE),
    "one batch": (X, r"Pass a single batch as the list `\[array\]`"),
    "labelled": ([(X, np.zeros(3))], "Leave labels out"),
    "shape": ([X[:, :5]], r"shapes \[\(None, 6, 8\)\]. Received: .*\(3, 5, 8\)"),
    "objects": ([np.array([[1], [1, 2]], object)], "Received: ndarray"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_batches_that_are_none(name):
    data, message = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=message) as error:
        keras_rfattn.calibrate(linear(), data, verbose=0)
    assert "Received: " in str(error.value)


def test_an_error_of_the_model_is_named():
    model = linear()

    def broken(*args, **kwargs):
        raise ZeroDivisionError("of the map")

    model.get_layer("attention").feature_map.bind = broken
    with pytest.raises(ValueError, match="(?s)raised ZeroDivision.*of the map"):
        keras_rfattn.calibrate(model, [X], exact=False, verbose=0)


def backbone(**arguments):
    hub = pytest.importorskip("keras_hub")
    model = hub.models.BertBackbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=8, max_sequence_length=16, **arguments,
    )  # fmt: skip
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


@slow_on_jax
def test_more_tokens_than_positions_name_what_extends_them():
    def inputs(length):
        ids = np.ones((4, length), "int32")
        return {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": ids}

    message = (
        "must have at most 16 tokens, .*`max_sequence_length`.*Received: 20 tokens"
        r".*keras_rfattn.extend_positions\(model, 20\)"
    )
    with pytest.raises(ValueError, match=message):
        m.uptrain(backbone(), inputs(20), batch_size=4)
