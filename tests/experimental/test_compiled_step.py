"""Decoding by compiled programs on PyTorch, against what is not compiled."""

import gc
import shutil
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import generation
from keras_rfattn.layers.attention import Attention
from tests import helpers as h
from tests.models.test_generation import array, linear, tokens

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile whole loops", allow_module_level=True)

import torch
import torch._inductor

from keras_rfattn.experimental.compiled_step import (
    KEPT_KINDS,
    Operations,
    compiled_steps,
)


@pytest.fixture
def traces(monkeypatch):
    """Returns a list of traces, which run as they are instead of being compiled."""
    traces = []

    def keep(trace, inputs):
        traces.append(trace)
        return trace

    monkeypatch.setattr(torch._inductor, "compile", keep)
    return traces


def generated(model, ids):
    mask = np.arange(ids.shape[1]) < np.array([[4], [7], [1]])
    inputs = {"token_ids": np.where(mask, ids, 0), "padding_mask": mask.astype("int32")}
    outputs = model.generate(inputs, stop_token_ids=None)
    return h.to_numpy(outputs["token_ids"])


def step(model, mask=None, rows=3, **arguments):
    """Logits and state after a last token, which follows a prefill of all others."""
    ids = tokens(rows)
    _, state = generation.prefill(model, ids[:, :-1], **arguments)
    return generation.step(model, ids[:, -1:], state, mask)


def uncompiled(function, *args, **kwargs):
    """Calls a function in another thread, in which no step is compiled."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def checked_step(model, **arguments):
    """Logits of a step, after a comparison with the uncompiled step."""
    expected = keras.tree.flatten(uncompiled(step, model, **arguments))
    results = keras.tree.flatten(step(model, **arguments))
    for result, x in zip(results, expected, strict=True):
        assert result.dtype == x.dtype
        np.testing.assert_allclose(array(result), array(x), rtol=1e-5, atol=1e-6)
    logits = array(results[0])
    assert np.abs(logits).max() > 0.01
    return logits


FAMILIES = [
    ("gpt2", "sliding"),
    ("llama", "mixed"),
    pytest.param("opt", "favorpp", marks=pytest.mark.full),
    pytest.param("gemma", "favorpp", marks=pytest.mark.full),
    pytest.param("smollm3", "window", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "mechanism"), FAMILIES)
def test_generates_the_same_tokens(traces, family, mechanism):
    model, ids = linear(family, mechanism), tokens()
    model.compile(sampler="greedy")
    expected = [generated(model, x) for x in (ids, ids[:, ::-1])]
    assert not traces
    with compiled_steps(model), warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch cannot compile")
        actual = [generated(model, x) for x in (ids, ids[:, ::-1])]
    np.testing.assert_array_equal(actual, expected)
    # Some blocks of SmolLM3 have no rotary embedding.
    programs = 2 if family == "smollm3" else 1
    assert len(traces) == programs
    np.testing.assert_array_equal(generated(model, ids), expected[0])
    assert len(traces) == programs


def double_weights(model):
    for weight in model.backbone.transformer_layers[1].trainable_weights:
        weight.assign(2 * weight)


def train_lora(model):
    model.backbone.enable_lora(2)
    for weight in model.trainable_weights:
        if "lora" in weight.path:
            weight.assign(0.3 * np.random.default_rng(0).normal(size=weight.shape))


def quantize(model):
    model.quantize("int8")


def set_bfloat16(model):
    for layer in model._flatten_layers():
        layer.dtype_policy = "mixed_bfloat16"


def set_bfloat16_of_one_layer(model):
    gate = model.backbone.transformer_layers[0]._feedforward_gate_dense
    gate.dtype_policy = "mixed_bfloat16"


def draw_other_vectors(model):
    keras_rfattn.restore_attention(model)
    keras_rfattn.replace_attention(model, "favorpp", num_features=16, seed=1)


@pytest.mark.parametrize(
    ("change", "programs"),
    [
        (double_weights, 1), (train_lora, 2), (quantize, 2), (set_bfloat16, 2),
        (set_bfloat16_of_one_layer, 2), (draw_other_vectors, 1),
    ],
)  # fmt: skip
def test_follows_a_model_that_changes(traces, change, programs):
    model = linear("llama")
    with compiled_steps(model):
        before = checked_step(model)
        change(model)
        after = checked_step(model)
        assert len(traces) == programs
    assert np.abs(after - before).max() > 5e-6


def test_restored_attention_is_not_compiled(traces):
    model, ids = linear("llama"), tokens()
    model.compile(sampler="greedy")
    with compiled_steps(model):
        checked_step(model)
        keras_rfattn.restore_attention(model)
        actual = generated(model, ids)
        np.testing.assert_array_equal(actual, uncompiled(generated, model, ids))
    assert len(traces) == 1


def test_blocks_that_differ_have_their_own_programs(traces):
    model = linear("llama")
    attention = model.backbone.transformer_layers[1]._self_attention_layer
    attention.rotary_embedding_layer.max_wavelength = 7
    with compiled_steps(model):
        checked_step(model)
    assert len(traces) == 2


def test_padding_is_an_argument_of_the_program(traces):
    # Without padding, which tokens enter and which pass is one tensor.
    model = linear("llama", "sliding")
    with compiled_steps(model):
        checked_step(model)
        checked_step(model, mask=np.array([[1], [0], [1]]))
    assert len(traces) == 1


def test_programs_are_dropped(traces):
    model = linear("llama", "mixed")
    old = model.backbone.transformer_layers[1]._feedforward_gate_dense.kernel.value
    old = weakref.ref(old)
    with compiled_steps(model):
        for length in range(12, 16):
            step(model, max_length=length)
        assert len(traces) == 1
        quantize(model)
        step(model, max_length=12)
        gc.collect()
        assert old() is None
        for rows in range(1, KEPT_KINDS + 3):
            step(model, rows=rows, max_length=12)
        programs = [weakref.ref(x) for x in traces]
        traces.clear()
        gc.collect()
        assert sum(x() is not None for x in programs) == KEPT_KINDS
    gc.collect()
    assert not any(x() is not None for x in programs)


def test_arrays_of_numpy_and_other_caches(traces):
    model, ids = linear("llama"), tokens()
    _, state = generation.prefill(model, ids[:, :-1])
    with torch.no_grad(), compiled_steps(model):
        logits, _, _ = model.call_with_cache(ids[:, -1:], state, 11)
        expected, _ = uncompiled(step, model)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="The cache of LlamaCausalLM"):
            model.call_with_cache(ids[:, -1:], np.zeros((3, 2, 2, 12, 2, 4)), 11)
    assert len(traces) == 1


def test_metrics_hooks_and_autocast_are_respected(traces):
    model = linear("llama")
    block = model.backbone.transformer_layers[0]
    attention = block._self_attention_layer
    with compiled_steps(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(model)
        assert not traces
        step(model)
        assert len(traces) == 1
        calls = []
        hook = block._feedforward_gate_dense.register_forward_hook(
            lambda *args: calls.append(1)
        )
        step(model)
        hook.remove()
        # Once in the prefill.
        assert len(calls) == 2
        _, state = generation.prefill(model, tokens()[:, :-1])
        attention.recorder = Attention.zero
        with pytest.raises(ValueError, match="must not generate tokens"):
            generation.step(model, tokens()[:, -1:], state)


def test_what_cannot_be_compiled_runs_after_a_warning(traces):
    model = linear("qwen_moe")
    with compiled_steps(model):
        with pytest.warns(UserWarning, match="PyTorch cannot compile"):
            checked_step(model)
        checked_step(model)
    assert not traces


def test_other_models_are_refused(monkeypatch):
    model = keras_rfattn.restore_attention(linear("llama"))
    match = "`model` must have causal linear attention. Received: LlamaCausalLM"
    with pytest.raises(ValueError, match=match), compiled_steps(model):
        pass
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    match = "must be PyTorch, because .* Received: 'jax'"
    with pytest.raises(ValueError, match=match), compiled_steps(linear("llama")):
        pass


FUNCTIONS = (
    lambda x: x * 2.0 + x[0],
    lambda x: x * 2 + x[0],
    lambda x: x * 3.0 + x[0],
    lambda x: x * 2.0 + x[1],
    lambda x: x[0] * 2.0 + x,
    lambda x: x * torch.tensor(2.0) + x[0],
    lambda x: x * torch.tensor(3.0) + x[0],
    lambda x: (x * 2.0 + x[0], x)[1],
)


def test_operations_tell_functions_apart():
    def text(function):
        with Operations([x]) as operations:
            output = function(x)
        return operations.text(output)

    x = torch.arange(4.0).reshape(2, 2)
    assert text(lambda x: x * 2.0 + x[0]) == text(lambda y: y * 2.0 + y[0])
    texts = {text(function) for function in FUNCTIONS}
    assert len(texts) == len(FUNCTIONS)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++")
def test_the_compiler_takes_a_block():
    model = linear("llama")
    with compiled_steps(model), warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch cannot compile")
        checked_step(model)
        double_weights(model)
        checked_step(model)
