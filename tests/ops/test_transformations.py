"""`torch.func`, forward mode and tracing, against plain gradients."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.backend import is_plain
from keras_rfattn.layers import MultiHeadAttention
from tests import helpers as h
from tests.marks import first

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("of PyTorch", allow_module_level=True)

from keras_rfattn.backend.torch import is_differentiated  # noqa: E402

WIDTH, LENGTH = 6, 7
CALLS = {
    "bidirectional": ({}, {}),
    "causal": ({}, {"use_causal_mask": True}),
    "windowed": ({"window": 2}, {}),
    "sliding": ({"window": 2, "sliding": True}, {"use_causal_mask": True}),
    "key mask": ({}, {"value_mask": np.arange(LENGTH)[None] > 1}),
}


def data(seed=0):
    x = np.random.default_rng(seed).normal(size=(1, LENGTH, WIDTH))
    return torch.tensor(x.astype("float32"))


def made(name, feature_map="favorplus"):
    options, call = CALLS[name]
    width = None if feature_map == "elu" else 6
    layer = MultiHeadAttention(
        2, 4, feature_map=feature_map, num_features=width, seed=0, **options
    )
    layer.build((None, None, WIDTH), (None, None, WIDTH))
    call = {k: torch.tensor(v) if k == "value_mask" else v for k, v in call.items()}

    def attend(x):
        return layer(x, x, **call)

    return layer, attend


WEIGHTS = torch.cos(torch.arange(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)


@pytest.mark.parametrize("feature_map", first(["favorpp", "favorplus", "elu"]))
@pytest.mark.parametrize("name", CALLS)
def test_torch_func(name, feature_map):
    if "window" in CALLS[name][0] and feature_map == "elu":
        pytest.skip("its kernel cannot be exact")
    layer, attend = made(name, feature_map)
    xs = torch.stack([data(i) for i in range(3)])

    def scalar(x):
        return (attend(x) * WEIGHTS).sum()

    def plain(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(scalar(x), x)[0]

    def close(found, wanted):
        h.assert_close(h.to_numpy(found.detach()), h.to_numpy(wanted), rtol=2e-5)

    expected = torch.stack([plain(x) for x in xs])
    close(torch.func.grad(scalar)(xs[0]), expected[0])
    vmap = torch.func.vmap
    close(vmap(torch.func.grad(scalar))(xs), expected)
    close(torch.func.grad(lambda x: vmap(scalar)(x).sum())(xs), expected)
    with torch.no_grad():
        outputs = torch.stack([attend(x) for x in xs])
    close(vmap(attend)(xs), outputs)
    close(torch.func.jacrev(scalar)(xs[0]), expected[0])
    _, pullback = torch.func.vjp(attend, xs[0])
    close(pullback(WEIGHTS[None])[0], expected[0])
    tangent = data(9)
    directional = (expected[0] * tangent).sum()
    _, found = torch.func.jvp(scalar, (xs[0],), (tangent,))
    close(found[None], directional[None])
    # And with respect to weights, as Keras passes them: PyTorch's `functional_call`
    # puts others into modules, where no Keras layer looks for them.
    x, trained = xs[0], layer.trainable_variables
    fixed = [v.value for v in layer.non_trainable_variables]

    def of_weights(weights):
        output, _ = layer.stateless_call(weights, fixed, x, x, **arguments(name))
        return (output * WEIGHTS).sum()

    found = torch.func.grad(of_weights)([v.value.detach() for v in trained])
    wanted = torch.autograd.grad(scalar(x), [v.value for v in trained])
    assert max(x.abs().max() for x in wanted) > 0.01
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def arguments(name):
    call = CALLS[name][1]
    return {k: torch.tensor(v) if k == "value_mask" else v for k, v in call.items()}


def test_a_replaced_model():
    x = keras.Input((LENGTH, WIDTH))
    y = keras.layers.MultiHeadAttention(2, 4)(x, x)
    model = keras.Model(x, keras.layers.Dense(1)(y))
    keras_rfattn.replace_attention(model, "favorpp", num_features=6, seed=0)
    xs = torch.stack([data(i) for i in range(2)])
    found = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(xs)
    one = xs.clone().requires_grad_()
    wanted = torch.autograd.grad(sum(model(x).sum() for x in one), one)[0]
    h.assert_close(h.to_numpy(found), h.to_numpy(wanted), rtol=2e-5)


def test_what_is_plain():
    x, seen = torch.ones(2), []

    def look(x):
        seen.append(is_plain(x))
        return x.sum()

    assert is_plain(x, x.clone().requires_grad_(), None, 3)
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, (x,), check_trace=False)
    look(x.to("meta"))
    torch.export.export(Looking(look), (x,), strict=False)
    assert len(seen) >= 6 and not any(seen)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        assert is_differentiated(forward_ad.make_dual(x, x))
        assert not is_differentiated(x)
    assert is_differentiated(x.clone().requires_grad_())


class Looking(torch.nn.Module):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        return self.look(x)


def test_a_release_without_the_names(monkeypatch):
    from torch.utils import _python_dispatch

    from keras_rfattn.backend import torch as plain

    _, attend = made("bidirectional")
    with torch.no_grad():
        expected = attend(data())
        monkeypatch.delattr(_python_dispatch, "is_in_torch_dispatch_mode")
        plain._modes.cache_clear()
        try:
            assert not is_plain(data())
            found = attend(data())
        finally:
            plain._modes.cache_clear()
    h.assert_close(h.to_numpy(found), h.to_numpy(expected))
