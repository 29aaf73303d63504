"""Control of gradients on PyTorch, which keeps all it computes for a gradient."""

import contextlib

import keras


def without_gradients():
    """Returns a context manager under which PyTorch keeps nothing for a gradient."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def with_gradient(function, variables, tensors):
    """Returns `function(*tensors)`; only its first result can be differentiated.

    PyTorch computes the gradient at once and keeps that, instead of everything that
    would be needed to compute it later. XLA and TensorFlow schedule their compiled
    programs themselves.

    Args:
        function: Function of tensors that returns a tuple of tensors, the first a
            scalar.
        variables: Keras variables that the function uses.
        tensors: Arguments of the function.

    Returns:
        The tuple of results.
    """
    if keras.backend.backend() != "torch":
        return function(*tensors)
    import torch

    class WithGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch.enable_grad():
                # Detached from the operations that computed them, whose gradient comes
                # later.
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
