"""Exponential features by PyTorch's fused softmax attention, against themselves."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import layers
from keras_rfattn.ops import Softmax, bidirectional
from keras_rfattn.ops.windows import Local, local_attention
from tests import helpers as h


def is_missing():
    if keras.backend.backend() != "torch":
        return True
    import torch

    return torch.cuda.is_available()


pytestmark = pytest.mark.skipif(is_missing(), reason="of PyTorch on a CPU")
if not is_missing():
    from keras_rfattn.fused import torch_cpu as fused
MAPS = ("favorplus", "favorpp", "favorpp_dense", "favorpp_learned")
WINDOWS = {"none": (None, False), "window": (5, False), "sliding": (3, True)}


def fixed(name):
    """The map, none of whose weights asks for a gradient."""
    feature_map = h.build(name)
    for weight in feature_map.variables:
        if weight.value.requires_grad:
            weight.value.requires_grad_(False)
    return feature_map


def attention(name, x, window=None, sliding=False, mask=None):
    feature_map = fixed(name)
    query, key, value = (ops.convert_to_tensor(a) for a in x)
    mask = None if mask is None else ops.convert_to_tensor(mask)
    features = h.featurized(feature_map, query, key, 1.0, mask, mask)
    local = None
    if window is not None:
        local = Local(query, key, Softmax(), window, sliding)
    output = fused.attention(*features, value, local, mask)
    if output is not None:
        return output
    if window is None:
        return bidirectional(*features, value, mask)
    return local_attention(*features, value, local, mask)


@pytest.fixture
def calls(monkeypatch):
    """How often the operation was asked."""
    found, softmax = [], fused._softmax

    def counted(*args):
        found.append(1)
        return softmax(*args)

    monkeypatch.setattr(fused, "_softmax", counted)
    return found


@pytest.fixture
def plain(monkeypatch):
    """Calls a function with features in memory."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "_is_possible", lambda *_: False)
            return h.to_numpy(function(*args))

    return call


@pytest.mark.parametrize("kind", ["full", "left", "scattered"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", MAPS)
def test_equals_features_in_memory(name, window, kind, calls, plain):
    for size in (0.5, 4):
        x = h.problem(size=size)
        args = name, x, *WINDOWS[window], h.padding_masks()[kind]
        expected = plain(attention, *args)
        assert not calls
        # Exponents of 100, each rounded to a part in 1e7.
        h.assert_close(attention(*args), expected, 1e-5 if size < 1 else 1e-4)
        assert calls
        calls.clear()


@pytest.mark.parametrize("sliding", [False, True])
def test_more_windows_than_weigh_each_other(sliding, monkeypatch, plain):
    monkeypatch.setattr(fused, "WINDOWS", 3)
    args = "favorpp", h.problem(size=0.5), 4, sliding, h.padding_masks()["left"]
    h.assert_close(attention(*args), plain(attention, *args))


def test_rows_that_see_no_key_are_zero(calls):
    mask = np.zeros((h.BATCH, h.LENGTH), bool)
    mask[1] = True
    for window, sliding in WINDOWS.values():
        found = h.to_numpy(attention("favorpp", h.problem(), window, sliding, mask))
        assert calls
        assert np.all(found[0] == 0)
        assert np.all(found[1] != 0)


def test_values_are_narrow(calls, plain):
    query, key, value = h.problem(size=0.5)
    x = query, key, ops.cast(value, "bfloat16")
    found = attention("favorpp", x)
    assert calls
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    h.assert_close(found, plain(attention, "favorpp", x), h.NARROW["bfloat16"])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", MAPS)
def test_double_precision(name, window, calls, plain):
    with h.double_precision():
        x = h.problem(size=0.5, dtype="float64")
        found = attention(name, x, *WINDOWS[window])
        assert calls
        assert keras.backend.standardize_dtype(found.dtype) == "float64"
        expected = plain(attention, name, x, *WINDOWS[window])
        h.assert_close(found, expected, 1e-6)


def test_neither_autocast_nor_forward_mode(calls):
    import torch

    x = [ops.convert_to_tensor(a) for a in h.problem(size=0.5)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.all(np.isfinite(h.to_numpy(attention("favorpp", x, 5))))
    value = x[2]

    def linear(value):
        return attention("favorpp", [*x[:2], value], 5)

    output, tangent = torch.func.jvp(linear, (value,), (value,))
    assert not calls
    # What attention gives is linear in the values.
    h.assert_close(tangent, output)


def test_gradient_of_the_exact_part_alone(calls):
    query, key, value = (ops.convert_to_tensor(a) for a in h.problem(size=0.5))
    feature_map = fixed("favorplus")
    features = feature_map.query_features(query), feature_map.key_features(key)
    exact = query.clone().requires_grad_()
    local = Local(exact, key, Softmax(), 5, False)
    assert fused.attention(*features, value, local) is None
    local_attention(*features, value, local).sum().backward()
    assert not calls
    assert float(exact.grad.abs().sum()) > 0


@pytest.mark.parametrize("part", [0, 1, 2])
def test_is_not_asked_for_a_gradient(part, calls):
    x = [ops.convert_to_tensor(a) for a in h.problem(size=0.5)]
    x[part].requires_grad_()
    attention("favorpp", x).sum().backward()
    assert not calls
    assert float(x[part].grad.abs().sum()) > 0


def test_no_token_at_all_ends_no_process(calls):
    assert attention("favorpp", h.problem(length=0, key_length=5)).shape[1] == 0
    with pytest.raises(IndexError, match="non-zero size"):
        attention("favorpp", h.problem(length=5, key_length=0))
    assert not calls


def test_dynamo_does_not_warn_of_a_cache():
    """Dynamo traces what a cached function calls, and warns of wrong results."""
    import torch

    layer = layers.MultiHeadAttention(2, 4, feature_map="favorplus", seed=0)
    x = ops.convert_to_tensor(h.problem().query[:, :, 0])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", ".*lru_cache")
        expected = layer(x, x)
        found = torch.compile(lambda x: layer(x, x), backend="eager")(x)
    h.assert_close(h.to_numpy(found), h.to_numpy(expected))
