"""A layer knows whether it is self-attention, whatever the objects of a call are."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention
from tests.helpers import assert_close, to_numpy

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)
X, OTHER = (2 * RNG.normal(size=(2, 12, 16)).astype("float32") for _ in range(2))
MAPS = {"statistics": {"feature_map": "favorpp"}, "window": {"window": 4}}


def layer(cls=MultiHeadAttention, **arguments):
    keras.utils.set_random_seed(0)
    sizes = (2, 8) if cls is MultiHeadAttention else (8, 4, 2)
    arguments = {"feature_map": "favorplus"} | arguments
    made = cls(*sizes, num_features=8, seed=0, **arguments)
    made.build((None, None, 16), (None, None, 16))
    return made


def functional(query_is_value=True):
    keras.utils.set_random_seed(0)
    one, two = keras.Input((None, 16)), keras.Input((None, 16))
    made = keras.layers.MultiHeadAttention(2, 8)
    if query_is_value:
        return keras.Model(one, made(one, one)), made
    return keras.Model([one, two], made(one, two)), made


def replaced(**arguments):
    model, made = functional()
    keras_rfattn.replace_attention(model, num_features=8, seed=0, **arguments)
    return made


def traced(function):
    """A function whose arguments are traced one by one."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    import torch

    def mapped(*args):
        return torch.vmap(lambda *rows: function(*(x[None] for x in rows))[0])(*args)

    return mapped


def tensors(*arrays):
    return [ops.convert_to_tensor(x) for x in arrays]


@pytest.mark.parametrize("name", MAPS)
def test_a_function_boundary_changes_nothing(name):
    x, copy = tensors(X, X)
    arguments = {"feature_map": "favorplus"} | MAPS[name]
    for made in (replaced(**arguments), layer(**arguments)):
        expected = to_numpy(made(x, x))
        for found in (made(x, copy), traced(lambda *a, m=made: m(*a))(x, x)):
            assert_close(found, expected, rtol=1e-5)
    # An explicit choice and the graph hold from the first call on.
    for made in (replaced(**arguments), layer(self_attention=True, **arguments)):
        found = traced(lambda *a, m=made: m(*a))(x, x)
        assert_close(found, made(x, x), rtol=1e-5)


@pytest.mark.parametrize("cls", [MultiHeadAttention, GroupedQueryAttention])
def test_cross_attention_stays_cross_attention(cls):
    x, other = tensors(X, OTHER)
    expected = to_numpy(
        layer(cls, feature_map="favorpp", self_attention=False)(x, other)
    )
    made = layer(cls, feature_map="favorpp")
    assert_close(made(x, other), expected)
    assert_close(traced(lambda q, v: made(q, v))(x, other), expected, rtol=1e-5)
    itself = layer(cls, feature_map="favorpp", self_attention=True)
    assert np.abs(to_numpy(itself(x, other)) - expected).max() > 1e-3
    # A layer of self-attention is one only for as many keys as queries.
    for short in (other[:, :9], other[:, :1]):
        assert_close(itself(x, short), made(x, short))


def test_the_graph_knows_cross_attention():
    model, made = functional(query_is_value=False)
    keras_rfattn.replace_attention(model, "favorpp", num_features=8, seed=0)
    x, other = tensors(X, OTHER)
    # The same tensor at run time does not make another function of it.
    by_copy = to_numpy(model([x, ops.copy(x)]))
    assert_close(model([x, x]), by_copy)
    assert made.self_attention is False
    with pytest.raises(ValueError, match="A `window` needs self-attention"):
        keras_rfattn.replace_attention(
            functional(query_is_value=False)[0], "favorplus", window=4
        )


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_graph_may_use_a_layer_in_both_ways(is_traced):
    one, two = keras.Input((12, 16)), keras.Input((12, 16))
    made = MultiHeadAttention(2, 8, feature_map="favorpp", num_features=8, seed=0)
    model = keras.Model([one, two], [made(one, one), made(one, two)])
    x, other = tensors(X, OTHER)
    call = traced(lambda *a: model(list(a))[0]) if is_traced else None
    first, second = model([x, other])
    first = first if call is None else call(x, other)
    for choice, arguments, found in (
        (True, (x, x), first),
        (False, (x, other), second),
    ):
        alone = layer(feature_map="favorpp", self_attention=choice)
        alone.set_weights(made.get_weights())
        assert_close(alone(*arguments), found, rtol=1e-5)
    # A checkpoint, for example, computes the first call again with copies.
    assert_close(made(x, ops.copy(x)), made(x, x), rtol=1e-5)
    softmax = keras.layers.MultiHeadAttention(2, 8)
    both = keras.Model([one, two], [softmax(one, one), softmax(one, two)])
    with pytest.raises(ValueError, match="A `window` needs self-attention"):
        keras_rfattn.replace_attention(both, "favorplus", window=4)
    assert not hasattr(softmax, "feature_map")


@pytest.mark.parametrize("first", ["itself", "other"])
def test_earlier_calls_change_no_other_call(first):
    x, copy, other = tensors(X, X, OTHER)
    expected = [layer(feature_map="favorpp", self_attention=True)(x, x)]
    expected.append(layer(feature_map="favorpp", self_attention=False)(x, other))
    made = layer(feature_map="favorpp")
    made(x, x if first == "itself" else other)
    for pair in ((x, x), (x, other), (x, copy)):
        assert_close(made(*pair), expected[pair[1] is other], rtol=1e-5)
    assert_close(made(x, x, key=other), layer(feature_map="favorpp")(x, x, key=other))
    itself = layer(window=4)
    itself(x, x)
    with pytest.raises(ValueError, match="A `window` needs self-attention"):
        itself(x, other)


@pytest.mark.skipif(BACKEND == "torch", reason="`vmap` is not a compiled function")
def test_what_nothing_tells_raises_where_it_matters():
    x, other = tensors(X, OTHER)
    for pair in ((x, x), (x, other)):
        made = layer(feature_map="favorpp")
        with pytest.raises(ValueError, match="whether queries and keys are the same"):
            traced(lambda q, v, m=made: m(q, v))(*pair)
        assert made.self_attention is None
    made = layer(feature_map="favorplus")
    assert_close(traced(lambda q, v: made(q, v))(x, other), made(x, other), rtol=1e-5)


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
@pytest.mark.parametrize("name", MAPS)
def test_checkpoints_have_the_same_gradient(name):
    from torch.utils.checkpoint import checkpoint

    made = layer(**MAPS[name])

    def gradient(function):
        x = ops.convert_to_tensor(X).requires_grad_()
        ops.sum(function(x) ** 2).backward()
        return to_numpy(x.grad)

    expected = gradient(lambda x: made(x, x))
    for kind in (False, True):
        found = gradient(lambda x, k=kind: checkpoint(made, x, x, use_reentrant=k))
        assert_close(found, expected, rtol=1e-5)


def test_blocks_know():
    keras_hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(0)
    inputs, memory = keras.Input((12, 16)), keras.Input((12, 16))
    encoder = keras_hub.layers.TransformerEncoder(32, 2)
    decoder = keras_hub.layers.TransformerDecoder(32, 2)
    model = keras.Model([inputs, memory], decoder(inputs, encoder(memory)))
    keras_rfattn.replace_attention(model, "favorpp", num_features=8, seed=0)
    assert encoder._self_attention_layer.self_attention is True
    assert decoder._self_attention_layer.self_attention is True
    assert decoder._cross_attention_layer.self_attention is False
    x, made = *tensors(X), encoder._self_attention_layer
    found = traced(lambda q, v: made(q, v))(x, x)
    assert_close(found, made(x, x), rtol=1e-5)
    keras_rfattn.restore_attention(model)
    assert not hasattr(made, "self_attention")


def test_the_choice_is_saved(tmp_path):
    for choice in (True, False):
        config = layer(self_attention=choice).get_config()
        assert MultiHeadAttention.from_config(config).self_attention is choice
    assert layer().get_config()["self_attention"] is None
    with pytest.raises(ValueError, match="self_attention"):
        layer(self_attention="yes")


@pytest.mark.parametrize("name", ["favorplus", "favorpp"])
def test_training_may_be_traced(name):
    model, _ = functional()
    keras_rfattn.replace_attention(model, name, num_features=8, seed=0)
    (x,) = tensors(X)
    expected = to_numpy(model(x))
    before = [to_numpy(w) for w in model.weights]
    if BACKEND == "torch":
        assert_close(model(x, training=ops.convert_to_tensor(False)), expected)
    else:
        step = traced(lambda x, training: model(x, training=training))
        for training in (True, False):
            found = step(x, ops.convert_to_tensor(training))
            assert_close(found, expected, rtol=1e-5)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), value)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras fails with softmax too")
def test_a_rematerialized_model_trains_alike():
    def losses(scope):
        with scope:
            model, _ = functional()
        keras_rfattn.replace_attention(model, "favorplus", num_features=8, seed=0)
        model.compile("sgd", "mse")
        return model.fit(X, OTHER, epochs=2, verbose=0).history["loss"]

    found = losses(keras.RematScope(mode="full"))
    np.testing.assert_allclose(found, losses(keras.RematScope(mode=None)), rtol=1e-5)
    assert found[1] < found[0]
