"""What PyTorch, which keeps for a gradient all it computes, has to be told."""

import contextlib

import keras


def without_gradients():
    """A context in which nothing is kept for a gradient."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def with_gradient(function, variables, tensors):
    """`function(*tensors)`, the first of whose results alone may be differentiated.

    PyTorch computes its gradient at once, and holds that instead of all that is needed
    for it. XLA and TensorFlow order what they compile by themselves.

    Args:
        function: Of tensors to a tuple of them, the first a scalar.
        variables: Keras variables that it uses.
        tensors: What it is given.
    """
    if keras.backend.backend() != "torch":
        return function(*tensors)
    import torch

    class WithGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch.enable_grad():
                # Cut off from what they were computed from, which comes later.
                live = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
                found = function(*live)
            inputs = [*inputs[: -len(live)], *live]
            wanted = [x for x in inputs if x.requires_grad]
            gradients = iter(
                torch.autograd.grad(
                    found[0], wanted, allow_unused=True, materialize_grads=True
                )
            )
            ctx.gradients = [
                next(gradients) if x.requires_grad else None for x in inputs
            ]
            return tuple(x.detach() for x in found)

        @staticmethod
        def backward(ctx, factor, *_):
            return tuple(None if x is None else factor * x for x in ctx.gradients)

    weights = [variable.value for variable in variables]
    inputs = (*weights, *tensors)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return function(*tensors)
    return WithGradient.apply(*inputs)
