"""Objects and functions that observe a layer or compute its output."""

import numpy as np
import pytest

from keras_rfattn.layers import MultiHeadAttention
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.call_context import Interceptor, context_of
from keras_rfattn.layers.recording import recording
from tests import helpers as h

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


class Softmax(Interceptor):
    """Computes softmax attention of inputs that are twice as large."""

    def __init__(self):
        self.calls = []

    def around(self, layer, function, args, kwargs):
        self.calls.append((layer, args, kwargs))
        return function(*(2 * x for x in args), **kwargs)

    def __call__(self, call):
        return call.softmax()


@pytest.fixture
def layer():
    made = MultiHeadAttention(2, 4, feature_map="favorplus", num_features=4, seed=0)
    made(X, X)
    return made


def test_an_interceptor_sees_the_call_and_computes_the_output(layer):
    linear = h.to_numpy(layer(X, X))
    double = layer(2 * X, 2 * X)
    with recording([(layer, Attention.softmax)]):
        expected = h.to_numpy(layer(2 * X, 2 * X))
    softmax = Softmax()
    with recording([(layer, softmax)]):
        found = h.to_numpy(layer(X, X, use_causal_mask=False))
    h.assert_close(found, expected)
    assert np.abs(found - h.to_numpy(double)).max() > 1e-3
    ((seen, args, kwargs),) = softmax.calls
    assert seen is layer and len(args) == 2 and kwargs == {"use_causal_mask": False}
    h.assert_same(h.to_numpy(layer(X, X)), linear)


def test_the_context_of_a_thread_comes_first(layer):
    linear = h.to_numpy(layer(X, X))
    with recording([(layer, Attention.zero)]):
        zero = h.to_numpy(layer(X, X))
        with context_of(layer).replace(recorder=Attention.softmax).active():
            softmax = h.to_numpy(layer(X, X))
        np.testing.assert_array_equal(h.to_numpy(layer(X, X)), zero)
    assert np.abs(softmax - zero).max() > 1e-3
    assert np.abs(linear - zero).max() > 1e-3


def test_nothing_returned_is_linear_attention(layer):
    calls = []
    with recording([(layer, calls.append)]):
        found = h.to_numpy(layer(X, X))
    h.assert_same(found, h.to_numpy(layer(X, X)))
    assert len(calls) == 1


def test_an_interceptor_must_define_its_call():
    class Empty(Interceptor):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Empty()
