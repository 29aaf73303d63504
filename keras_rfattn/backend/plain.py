"""Checks whether PyTorch tensors have values, or are traced or transformed.

Some shortcuts read values, overwrite an array, or call an operation that has no
gradient. They are correct for plain tensors only: not inside `torch.compile`,
`torch.export` or `torch.jit.trace`, and not for tensors of `torch.func`, of a dispatch
mode or of a subclass such as `FakeTensor`. JAX and TensorFlow raise an exception in
these cases.
"""

import functools

import keras


def is_plain(*arrays):
    """Returns whether all PyTorch tensors in `arrays` are ordinary ones, on any device.

    If PyTorch does not tell, the result is `False`, which selects the general path.
    """
    if keras.backend.backend() != "torch":
        return True
    import torch

    if torch.compiler.is_compiling() or any(asked() for asked in _modes()):
        return False
    return all(_has_memory(x) for x in arrays if isinstance(x, torch.Tensor))


def is_differentiated(*arrays):
    """Returns whether PyTorch tensors need a gradient, in forward or reverse mode."""
    import torch
    from torch.autograd import forward_ad

    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in arrays)


def are_values_at_hand(*arrays):
    """Returns whether reading the tensors' values is correct, and cheap: on a CPU."""
    return is_plain(*arrays) and all(x.device.type == "cpu" for x in arrays)


def _has_memory(x):
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    try:
        # Tensors of `torch.func` have the same class, but no memory.
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _modes():
    """Returns functions that say whether PyTorch observes all computations.

    The observer is `torch.jit.trace` or a dispatch mode. Only a private name of PyTorch
    tells about the latter; a release without it is treated as if there were a mode.
    """
    try:
        from torch.jit import is_tracing
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode
    except ImportError:
        return (lambda: True,)
    return is_tracing, is_in_torch_dispatch_mode
