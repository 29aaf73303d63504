import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.backend import with_gradient, without_gradients

needs_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="of PyTorch's graph"
)


def squares(weight, unused, x, y):
    product = ops.matmul(x, weight.value)
    return ops.sum(ops.square(product - y)), product, ops.mean(y, axis=0)


def example():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 5, 3)).astype("float32")
    weight = keras.Variable(generator.normal(size=(3, 3)), dtype="float32")
    unused = keras.Variable(generator.normal(size=2), dtype="float32")
    return (weight, unused), (ops.convert_to_tensor(x), ops.convert_to_tensor(y))


def test_values_are_those_of_the_function():
    variables, tensors = example()
    found = with_gradient(lambda *x: squares(*variables, *x), variables, tensors)
    wanted = squares(*variables, *tensors)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (a, b)))


@needs_torch
def test_gradients_are_those_of_the_function():
    import torch

    results = []
    for at_once in (False, True):
        variables, (x, y) = example()
        first = x.clone().requires_grad_(True)
        x = 2 * first  # computed from something that wants a gradient too

        def function(*tensors, variables=variables):
            return squares(*variables, *tensors)

        if at_once:
            loss, *_ = with_gradient(function, variables, (x, y))
        else:
            loss, *_ = function(x, y)
        (torch.sin(loss) / 3).backward()
        assert y.grad is None
        results.append([variables[0].value.grad, first.grad])
        gradient = variables[1].value.grad
        assert gradient is None or not gradient.any()
    for a, b in zip(*results, strict=True):
        assert a.abs().max() > 1e-3
        np.testing.assert_allclose(a.cpu(), b.cpu(), rtol=1e-5)


@needs_torch
def test_a_graph_holds_gradients_alone():
    import torch

    variables, tensors = example()
    held = []

    def keep(x):
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        squares(*variables, *tensors)
    assert held
    loss, *_ = with_gradient(lambda *x: squares(*variables, *x), variables, tensors)
    node = loss.grad_fn
    assert not node.saved_tensors and not any(x for x, _ in node.next_functions[2:])
    shapes = {tuple(x.shape) for x in node.gradients if x is not None}
    assert shapes == {(3, 3), (2,)}


@needs_torch
def test_tensors_are_freed_without_looking_for_cycles():
    """Otherwise the memory of a training grows with its steps."""
    variables, tensors = example()
    large = ops.ones((1000,))
    freed = weakref.ref(large)

    def function(*given, kept=large):
        return squares(*variables, *given[:-1], given[-1] + kept[0])

    gc.disable()
    try:
        loss, *_ = with_gradient(function, variables, tensors)
        loss.backward()
        del loss, large, function, _
        assert freed() is None
    finally:
        gc.enable()


@needs_torch
def test_nothing_to_differentiate_leaves_no_graph():
    variables, tensors = example()
    for variable in variables:
        variable.trainable = False
    found = with_gradient(lambda *x: squares(*variables, *x), variables, tensors)
    assert not any(x.requires_grad for x in found)
    variables[0].trainable = True
    with without_gradients():
        found = with_gradient(lambda *x: squares(*variables, *x), variables, tensors)
    assert not any(x.requires_grad for x in found)
