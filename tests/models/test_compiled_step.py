"""The compiled decoding of one token on PyTorch, against what is not compiled."""

import shutil
import warnings

import keras
import numpy as np
import pytest

from keras_rfattn import generation
from keras_rfattn.layers.attention import Attention
from tests import helpers as h
from tests.models.test_generation import linear, tokens

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile whole loops", allow_module_level=True)

import torch
import torch._inductor

from keras_rfattn.backend.traced import Programs


@pytest.fixture
def traces(monkeypatch):
    """Returns a list of traces, which run as they are instead of being compiled."""
    found = []

    def kept(trace, inputs):
        found.append(trace)
        return trace

    monkeypatch.setattr(torch._inductor, "compile", kept)
    return found


def generated(model, ids):
    mask = np.arange(ids.shape[1]) < np.array([[4], [7], [1]])
    inputs = {"token_ids": np.where(mask, ids, 0), "padding_mask": mask.astype("int32")}
    outputs = model.generate(inputs, stop_token_ids=None)
    return h.to_numpy(outputs["token_ids"])


FAMILIES = [
    ("gpt2", "sliding"),
    ("llama", "mixed"),
    pytest.param("opt", "favorpp", marks=pytest.mark.full),
    pytest.param("gemma", "favorpp", marks=pytest.mark.full),
    pytest.param("qwen3_5", "favorpp", marks=pytest.mark.full),
    pytest.param("llama", "heads", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "mechanism"), FAMILIES)
def test_one_program_generates_the_same_tokens(traces, family, mechanism):
    model, ids = linear(family, mechanism), tokens()
    model.compile(sampler="greedy")
    expected = [generated(model, x) for x in (ids, ids[:, ::-1])]
    assert not traces
    model.compile(sampler="greedy", jit_compile=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch cannot compile")
        found = [generated(model, x) for x in (ids, ids[:, ::-1])]
    np.testing.assert_array_equal(found, expected)
    assert len(traces) == 1


def test_no_operation_waits_for_the_device(traces):
    # A number of Python that becomes a tensor, and a tensor that becomes a number.
    model = linear("llama", "sliding")
    model.compile(sampler="greedy", jit_compile=True)
    generated(model, tokens())
    names = {str(x.target) for x in traces[0].graph.nodes}
    assert any("bmm" in x for x in names)
    waiting = ("lift_fresh", "_local_scalar_dense", "nonzero", "scalar_tensor")
    assert not [x for x in names if any(y in x for y in waiting)]


def test_programs_follow_a_model_that_changes(traces):
    model, ids = linear("llama"), tokens()
    model.compile(jit_compile=True)

    def last():
        _, state = generation.prefill(model, ids[:, :-1])
        return h.to_numpy(generation.step(model, ids[:, -1:], state)[0])[:, 0]

    def expected():
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        return h.to_numpy(model(inputs))[:, -1]

    first = last()
    h.assert_close(first, expected())
    model.backbone.token_embedding.embeddings.assign(
        model.backbone.token_embedding.embeddings * 2
    )
    second = last()
    h.assert_close(second, expected())
    assert len(traces) == 1
    model.backbone.enable_lora(2)
    for weight in model.trainable_weights:
        if "lora" in weight.path:
            weight.assign(0.3 * np.random.default_rng(0).normal(size=weight.shape))
    third = last()
    h.assert_close(third, expected())
    assert len(traces) == 2
    assert np.abs(first - second).max() > 1e-2 < np.abs(second - third).max()


def test_a_metric_may_not_generate_by_a_program(traces):
    model, ids = linear("llama"), tokens()
    model.compile(jit_compile=True)
    _, state = generation.prefill(model, ids[:, :-1])
    generation.step(model, ids[:, -1:], state)
    assert len(traces) == 1
    layers = [x for x in model._flatten_layers() if hasattr(x, "recorder")]
    layers[0].recorder = Attention.zero
    with pytest.raises(ValueError, match="must not generate tokens"):
        generation.step(model, ids[:, -1:], state)


def test_autocast_passes_what_is_compiled(traces):
    programs, x = Programs(), torch.ones(2, 2)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = programs.run(torch.matmul, (x, x), [])
        assert found.dtype == torch.bfloat16 and not traces
        assert programs.run(torch.matmul, (x, x), []).dtype == torch.float32


def test_what_cannot_be_compiled_runs_after_a_warning(traces):
    def reads(x):
        return {"y": x + x[0].item()}

    programs, x = Programs(), torch.arange(3.0) + 1
    with torch.no_grad():
        with pytest.warns(UserWarning, match="cannot compile a step of generation"):
            found = programs.run(reads, (x,), [])
        again = programs.run(reads, (2 * x,), [])
    assert found["y"].tolist() == [2, 3, 4] and again["y"].tolist() == [4, 6, 8]
    assert not traces


def test_constants_are_not_overwritten(traces):
    def function(x):
        y = torch.zeros(4) + 1
        y.view(2, 2).add_(x)
        return y

    programs, x = Programs(), torch.ones(2, 2)
    with torch.no_grad():
        for _ in range(2):
            assert programs.run(function, (x,), []).tolist() == [2, 2, 2, 2]
    names = [str(x.target) for x in traces[0].graph.nodes]
    assert "aten.zeros.default" not in names


def test_a_gradient_passes_what_is_compiled():
    x = torch.ones(2, requires_grad=True)
    Programs().run(lambda x: 3 * x, (x,), []).sum().backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++")
def test_the_compiler_takes_the_trace():
    weight = torch.nn.Parameter(torch.ones(2))

    def function(x, scale):
        return x * keras.ops.convert_to_tensor(2.0) * weight, scale * x

    programs, x = Programs(), torch.arange(4.0).reshape(2, 2)
    with torch.no_grad():
        for scale in (1, 2):
            found = programs.run(function, (x, scale), [weight])
            assert found[0].tolist() == [[0, 2], [4, 6]]
            assert found[1].tolist() == (scale * x).tolist()
        weight.mul_(3)
        # Other strides are no other program.
        found = programs.run(function, (x.T, 2), [weight])
        assert found[0].tolist() == [[0, 12], [6, 18]]
    assert len(programs.programs) == 2


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++")
def test_the_compiler_takes_a_model():
    model, ids = linear("llama", "sliding"), tokens()
    model.compile(sampler="greedy")
    expected = generated(model, ids)
    model.compile(sampler="greedy", jit_compile=True)
    np.testing.assert_array_equal(generated(model, ids), expected)
