"""Nothing of one call is seen by another, after an exception or in another thread."""

import contextlib
import sys
import threading

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention
from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.ops import AttentionMask
from tests import helpers as h
from tests.marks import ONE_BACKEND, slow_on_jax
from tests.models import families

IDS = np.array([[0] * 4 + [1] * 4] * 2, "int32")
# Neither padding nor causal.
WRONG = np.random.default_rng(0).integers(0, 2, (2, 8, 8))


def data(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 8, 16)).astype("float32")


def made(cls=MultiHeadAttention, feature_map="favorplus", **options):
    sizes = (2, 8) if cls is MultiHeadAttention else (8, 2, 1)
    layer = cls(*sizes, feature_map=feature_map, num_features=8, seed=0, **options)
    keras.utils.set_random_seed(0)
    layer.build((None, None, 16), (None, None, 16))
    return layer


@slow_on_jax
@pytest.mark.parametrize("cls", [MultiHeadAttention, GroupedQueryAttention])
def test_segments_are_forgotten_when_a_call_raises(cls):
    layer, x = made(cls), ops.convert_to_tensor(data())
    expected = h.to_numpy(layer(x, x))
    packed = h.to_numpy(layer(x, x, segment_ids=IDS))
    assert np.abs(packed - expected).max() > 0.01
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        layer(x, x, segment_ids=IDS, attention_mask=WRONG)
    np.testing.assert_array_equal(h.to_numpy(layer(x, x)), expected)
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        layer.call(x, x, segment_ids=ops.convert_to_tensor(IDS), attention_mask=WRONG)
    np.testing.assert_array_equal(h.to_numpy(layer(x, x)), expected)
    with pytest.raises(ValueError, match="never forms attention scores"):
        layer(x, x, return_attention_scores=True)
    np.testing.assert_array_equal(h.to_numpy(layer(x, x)), expected)


def test_a_direct_call_is_the_same():
    # Statistics are of self-attention alone.
    x, found = ops.convert_to_tensor(data()), []
    other = ops.convert_to_tensor(data(1))
    for key in (x, other):
        layer = made(feature_map="favorpp")
        found.append(h.to_numpy(layer.call(x, key)))
        np.testing.assert_array_equal(h.to_numpy(layer(x, key)), found[-1])
    layer = made(feature_map="favorpp", self_attention=True)
    np.testing.assert_array_equal(h.to_numpy(layer(x, x)), found[0])
    assert np.abs(h.to_numpy(layer(x, other)) - found[1]).max() > 1e-3


@pytest.mark.once
@slow_on_jax
@pytest.mark.parametrize("name", ["gemma", "moonshine", "qwen3_moe"])
def test_masks_are_forgotten_when_a_call_raises(name, monkeypatch):
    pytest.importorskip("keras_hub")
    model, inputs = families.build(name)
    keras_rfattn.replace_attention(model, "favorplus", num_features=8, seed=0)
    expected = families.outputs(model, inputs)
    layers = [x for x in model._flatten_layers() if hasattr(x, "feature_map")]

    def fail(*args, **kwargs):
        raise RuntimeError("on purpose")

    # Between what a block or a layer knows of a mask and its use.
    for layer in layers:
        projections = [x for x in layer._flatten_layers(include_self=False)
                       if isinstance(x, keras.layers.EinsumDense)]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(type(projections[0]), "call", fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                model(inputs)
        assert context_of(layer).mask is None
    for found, wanted in zip(families.outputs(model, inputs), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # A layer of the model by itself, right after such a failure.
    layer, x = layers[-1], ops.convert_to_tensor(data())
    arguments = (x,) if name != "moonshine" else (x, x, x)
    masks = AttentionMask(causal=True), None

    def outputs():
        found = (layer(*arguments, attention_mask=mask) for mask in masks)
        return [h.to_numpy(x[0] if isinstance(x, tuple) else x) for x in found]

    alone = outputs()
    with contextlib.suppress(RuntimeError), monkeypatch.context() as patch:
        patch.setattr(keras.layers.EinsumDense, "call", fail)
        model(inputs)
    masks = masks[::-1]
    np.testing.assert_array_equal(outputs()[::-1], alone)


def at_once(*functions, calls):
    """What functions return in so many calls, each in a thread of its own."""
    interval = sys.getswitchinterval()
    found, failed = [[] for _ in functions], []
    barrier = threading.Barrier(len(functions))

    def run(function, results):
        try:
            barrier.wait()
            for _ in range(calls):
                results.append(function())
        except Exception as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in zip(functions, found, strict=True)
    ]
    # Threads alternate within a call, and not once in a few.
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed, failed
    return found


@pytest.mark.parametrize(
    ("shared", "calls"),
    [(True, 10)] + [pytest.param(x, 200, marks=ONE_BACKEND) for x in (True, False)],
)
def test_threads_do_not_meet(shared, calls):
    one = made()
    other = one if shared else made()
    x = ops.convert_to_tensor(data())

    def packed():
        return h.to_numpy(one(x, x, segment_ids=IDS))

    def plain():
        return h.to_numpy(other(x, x))

    functions = packed, plain
    expected = [function() for function in functions]
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    for found, wanted in zip(at_once(*functions, calls=calls), expected, strict=True):
        assert len(found) == calls
        for x_found in found:
            np.testing.assert_allclose(x_found, wanted, atol=1e-6 * wanted.max())


@pytest.mark.parametrize(
    "family",
    ["llama"] + [pytest.param(x, marks=ONE_BACKEND) for x in ("gpt2", "gpt_neo_x")],
)
def test_one_thread_generates_while_others_predict(family):
    pytest.importorskip("keras_hub")
    if keras.backend.backend() != "torch":
        pytest.skip("elsewhere the compiled program alone generates")
    task, inputs = families.build(family)
    paths = [x.path for x in keras_rfattn.describe_attention(task).kept]
    # Softmax layers beside linear ones, and rotary embeddings in both.
    keras_rfattn.replace_attention(
        task, "favorplus", num_features=8, seed=0, exclude=paths[:1]
    )
    task.compile(sampler="greedy")
    prompt = {"token_ids": inputs["token_ids"].copy(),
              "padding_mask": inputs["padding_mask"].copy()}  # fmt: skip
    prompt["padding_mask"][:, 4:] = 0
    other = {"token_ids": inputs["token_ids"][:, ::-1].copy(),
             "padding_mask": prompt["padding_mask"].copy()}  # fmt: skip

    def generates(given):
        def once():
            output = task.generate_step(given, stop_token_ids=None)
            return h.to_numpy(output["token_ids"])

        return once

    def predicts():
        return h.to_numpy(task(inputs, training=False))

    import torch

    def without_gradients(function):
        def call():
            with torch.no_grad():
                return function()

        return call

    functions = [
        without_gradients(x) for x in (predicts, generates(prompt), generates(other))
    ]
    expected = [x() for x in functions]
    assert np.any(expected[1] != expected[2])
    for found, wanted in zip(at_once(*functions, calls=5), expected, strict=True):
        for x in found:
            np.testing.assert_allclose(x, wanted, atol=1e-5)
    # And nothing is left.
    assert not any("call" in vars(x) for x in task._flatten_layers())


def test_another_call_is_of_one_thread():
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    x = ops.ones((1, 2))
    dense(x)
    seen = {}

    def look():
        seen["other"] = float(dense(x)[0, 0])

    def doubled(call):
        return lambda x: 2 * call(x)

    with replacing_call(dense, doubled), replacing_call(dense, doubled):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        seen["own"] = float(dense(x)[0, 0])
    with pytest.raises(ZeroDivisionError), replacing_call(dense, doubled):
        raise ZeroDivisionError
    assert seen == {"other": 2.0, "own": 8.0}
    assert float(dense(x)[0, 0]) == 2.0 and "call" not in vars(dense)


@pytest.mark.parametrize("packed", [pytest.param(True, marks=ONE_BACKEND), False])
def test_what_runs_again_for_a_gradient_knows_the_same(packed):
    # Statistics of self-attention, and segments, are of the call.
    with keras.RematScope(mode="full"):
        again = made(feature_map="favorpp", max_segments=2)
    plain = made(feature_map="favorpp", max_segments=2)
    assert again._remat_mode is not None
    again.set_weights(plain.get_weights())
    given = {"segment_ids": ops.convert_to_tensor(IDS)} if packed else {}

    def gradient(layer):
        return h.gradients(lambda x: layer(x, x, **given), data())[0]

    found, expected = gradient(again), gradient(plain)
    h.assert_close(found, expected, rtol=1e-5)
    # With statistics of cross-attention, or without segments, it is another one.
    if packed:
        other = h.gradients(lambda x: plain(x, x), data())[0]
    else:
        other = gradient(made(feature_map="favorpp", self_attention=False))
    assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max()
