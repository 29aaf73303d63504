"""The Triton kernels, in Triton's interpreter on a CPU, against all pairs of tokens.

Uninitialized memory and the surroundings of every array hold NaN, so that a read out of
bounds shows.
"""

import importlib.util
import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.experimental import triton
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options
from keras_rfattn.ops.features import LOWEST
from tests import helpers as h
from tests.house import ROOT

IS_TORCH = keras.backend.backend() == "torch"
HAS_TRITON = importlib.util.find_spec("triton") is not None

on_torch = pytest.mark.skipif(
    not (IS_TORCH and HAS_TRITON), reason="Triton runs with PyTorch"
)

if IS_TORCH and HAS_TRITON:
    import torch

    from keras_rfattn.experimental.triton import plan
    from keras_rfattn.experimental.triton.launch import linear_attention
    from keras_rfattn.experimental.triton.plan import Sizes

    # `conftest` selects the interpreter where there is no GPU.
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def guarded(x):
    """Returns a copy of a tensor between NaN."""
    around = 4096
    memory = torch.full((x.numel() + 2 * around,), torch.nan, dtype=x.dtype)
    memory[around:-around] = x.flatten()
    found = memory.to(DEVICE)[around:-around].view(x.shape)
    return found.requires_grad_()


def tensors(
    batch=1, length=40, keys=None, kv_heads=1, groups=1, head_dim=8, num_features=16,
    value_dim=8, is_shared=True, jump=0.0, mask=None, dtype="float32",
):  # fmt: skip
    """Returns random arguments; `jump` scales the exponents of keys."""
    keys = length if keys is None else keys
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    owner = 1 if is_shared else batch
    query, key, value = (
        normal(batch, n, heads, width).to(getattr(torch, dtype))
        for n, heads, width in (
            (length, kv_heads * groups, head_dim),
            (keys, kv_heads, head_dim),
            (keys, kv_heads, value_dim),
        )
    )
    vectors = [normal(owner, kv_heads, head_dim, num_features) for _ in range(2)]
    biases = [normal(owner, kv_heads, 1, num_features) for _ in range(2)]
    term = normal(batch, keys, kv_heads)
    term = term + jump * torch.rand(batch, keys, kv_heads, generator=generator)
    if mask is not None:
        term = torch.where(torch.tensor(mask)[..., None], term, LOWEST)
    return [guarded(x) for x in (query, key, *vectors, *biases, term, value)]


def run(arguments, causal, sizes):
    query, key, *maps, term, value = arguments
    return linear_attention((query, key), maps, term, value, causal, sizes)


def wanted(arguments, causal):
    """Attention by weights of all pairs of tokens, in float64."""
    query, key, *maps, term, value = (x.double() for x in arguments)
    query_vectors, key_vectors, query_bias, key_bias = maps
    groups = query.shape[2] // key.shape[2]

    def exponents(x, vectors, bias):
        heads = x.shape[2] // vectors.shape[1]
        vectors = vectors.expand(len(x), -1, -1, -1).repeat_interleave(heads, 1)
        products = torch.einsum("btnh,bnhm->bntm", x, vectors)
        return products + bias.repeat_interleave(heads, 1)

    queries = exponents(query, query_vectors, query_bias)
    keys = exponents(key, key_vectors, key_bias) + term.mT[..., None]
    keys, value = (
        x.repeat_interleave(groups, 1) for x in (keys, value.transpose(1, 2))
    )
    logits = torch.logsumexp(queries[..., :, None, :] + keys[..., None, :, :], -1)
    visible = (term > LOWEST / 2).mT.repeat_interleave(groups, 1)[..., None, :]
    visible = visible.expand(logits.shape)
    if causal:
        visible = visible & torch.ones(logits.shape[-2:], device=DEVICE).tril().bool()
    some = visible.any(-1, keepdim=True)
    logits = torch.where(visible, logits, -torch.inf)
    weights = torch.softmax(torch.where(some, logits, 0), -1) * some
    return (weights @ value).transpose(1, 2)


def gradients(output, arguments):
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(*output.shape, generator=generator).to(DEVICE)
    return torch.autograd.grad((output * direction).sum(), arguments)


def padded(*counts, length=40):
    return np.arange(length)[None] < np.array(counts)[:, None]


@pytest.fixture(autouse=True)
def memory_of_nan(monkeypatch):
    if not (IS_TORCH and HAS_TRITON):
        return
    empty = torch.empty

    def filled(*args, **kwargs):
        found = empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(plan.torch, "empty", filled)


CASES = {
    "one block": {"length": 12},
    "parts and groups": {"kv_heads": 2, "groups": 3, "head_dim": 12},
    "padding": {"batch": 2, "mask": padded(40, 5), "is_shared": False},
    "a width that is no power of two": {"num_features": 40, "value_dim": 20},
    "the largest width": {"length": 20, "num_features": 128},
    "no visible key": {"batch": 2, "mask": padded(0, 17)},
}


@on_torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, causal):
    arguments = tensors(**CASES[case])
    output = run(arguments, causal, Sizes(16, 2, 16))
    expected = wanted(arguments, causal)
    h.assert_close(output, expected, rtol=3e-6)
    slopes = gradients(output, arguments), gradients(expected, arguments)
    h.assert_gradients_close(*slopes, 1e-5, all_clear=False)


@on_torch
def test_keys_of_another_length():
    arguments = tensors(length=20, keys=40)
    output = run(arguments, False, Sizes(16, 2, 16))
    h.assert_close(output, wanted(arguments, False), rtol=3e-6)


@on_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    arguments = tensors(dtype=dtype)
    output = run(arguments, True, Sizes(16, 2, 16))
    assert output.dtype == arguments[0].dtype
    expected = wanted(arguments, True)
    rtol = h.NARROW[dtype]
    h.assert_close(output, expected, rtol=rtol)
    found = gradients(output.float(), arguments)
    h.assert_gradients_close(found, gradients(expected, arguments), 2 * rtol)


@on_torch
def test_exponents_of_any_size():
    # Keys whose exponents exceed those before by hundreds are computed one by one.
    arguments = tensors(length=24, groups=2, jump=300.0)
    output = run(arguments, True, Sizes(16, 2, 16))
    expected = wanted(arguments, True)
    # Exponents of 300 are rounded by 1.5e-5.
    h.assert_close(output, expected, rtol=1e-4)
    found = gradients(output, arguments)
    h.assert_gradients_close(
        found, gradients(expected, arguments), 1e-3, all_clear=False
    )


@on_torch
@pytest.mark.parametrize("jump", [0.0, 300.0])
def test_the_future_changes_no_bit(jump):
    arguments = tensors(jump=jump)
    output = run(arguments, True, Sizes(16, 2, 16))
    changed = [x.detach().clone() for x in arguments]
    for at in (0, 1, -1):
        changed[at][:, 21:] = 30 * changed[at][:, 21:] + 5
    changed[-2][:, 25:] += 200
    other = run(changed, True, Sizes(16, 2, 16))
    assert torch.equal(output[:, :21], other[:, :21])
    assert not torch.equal(output[:, 21:], other[:, 21:])


@on_torch
@pytest.mark.parametrize(
    ("name", "causal"),
    [("favorplus", True), ("favorpp", False), ("favorpp_learned", True)],
)
def test_feature_maps(name, causal):
    feature_map = h.build(name, kv_heads=2, head_dim=8, num_features=16)
    generator = np.random.default_rng(0)
    tokens = [
        generator.normal(size=(2, 20, heads, 8)).astype("float32")
        for heads in (4, 2, 2)
    ]
    visible = padded(20, 9, length=20)
    mask = AttentionMask(visible, causal=causal, self_attention=True)
    tokens = [torch.tensor(x).to(DEVICE).requires_grad_() for x in tokens]
    weights = [v.value for v in feature_map.trainable_variables]
    found = []
    for implementation in ("xla", "triton"):
        options = Options(implementation=implementation, block_size=16)
        output = attend(*tokens, feature_map, mask, options=options)
        found.append((output, gradients(output, [*tokens, *weights])))
    (expected, expected_slopes), (output, slopes) = found
    h.assert_close(output, expected, rtol=5e-6)
    h.assert_gradients_close(slopes, expected_slopes, 1e-5, all_clear=False)


@on_torch
def test_float64_is_refused():
    tokens = [torch.zeros((1, 4, 1, 8), dtype=torch.float64)] * 3
    feature_map = h.build("favorpp", kv_heads=1, head_dim=8, num_features=16)
    with pytest.raises(ValueError, match="Received: values of dtype float64"):
        options = Options(implementation="triton")
        attend(*tokens, feature_map, AttentionMask(), options=options)


@on_torch
def test_the_report_and_what_is_refused():
    inputs = keras.Input((12, 16))
    layer = keras.layers.MultiHeadAttention(2, 8)
    model = keras.Model(inputs, layer(inputs, inputs))
    refused = {
        "without a window": ("favorpp", {"window": 4}),
        "features of 'elu' are not exponentials": ("elu", {}),
        "features of 'hedgehog' are not exponentials": ("hedgehog", {}),
        "at most 128 features, and 'favorpp' has 129": (
            "favorpp",
            {"num_features": 129},
        ),
    }
    for reason, (name, arguments) in refused.items():
        with pytest.raises(ValueError, match=reason):
            keras_rfattn.replace_attention(
                model, name, implementation="triton", **arguments
            )
    assert not keras_rfattn.describe_attention(model).replaced
    keras_rfattn.replace_attention(
        model, "favorpp", num_features=16, implementation="triton"
    )
    lines = str(keras_rfattn.describe_attention(model))
    assert "computed by triton as asked" in " ".join(lines.split())


def test_a_backend_without_kernels_says_so(monkeypatch):
    feature_map = h.build("favorpp", kv_heads=1, head_dim=8, num_features=16)
    if IS_TORCH:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "not installed" in triton.obstacle(Options(), feature_map)
    else:
        assert "run on PyTorch" in triton.obstacle(Options(), feature_map)


@on_torch
@pytest.mark.full
def test_the_benchmark_runs(tmp_path):
    results, script = tmp_path / "gpu.jsonl", ROOT.parent / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--smoke", "--results", str(results)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    rows = [json.loads(x) for x in results.read_text().splitlines()]
    assert rows[-1] == {"left_out": []}
    for row in rows:
        assert row.get("layer") is None or "triton" in row["ms"]
    assert sum("check" in x for x in rows) == 2
