"""Whether PyTorch's numbers are at hand, or belong to a program or a transformation.

Some shortcuts look at values, overwrite an array, or call an operation that has no
gradient. They are right for plain tensors alone: not inside of `torch.compile`,
`torch.export` and `torch.jit.trace`, not for the tensors of `torch.func`, of a mode of
dispatch or of a subclass, such as a `FakeTensor`. JAX and TensorFlow say so themselves
by an exception.
"""

import functools

import keras


def is_plain(*arrays):
    """Whether all PyTorch tensors among `arrays` are ordinary ones, whatever device.

    If PyTorch does not tell, the answer is `False`, which leads to the general path.
    """
    if keras.backend.backend() != "torch":
        return True
    import torch

    if torch.compiler.is_compiling() or any(asked() for asked in _modes()):
        return False
    return all(_has_memory(x) for x in arrays if isinstance(x, torch.Tensor))


def is_differentiated(*arrays):
    """Whether a gradient of plain PyTorch tensors is asked for, in either mode."""
    import torch
    from torch.autograd import forward_ad

    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in arrays)


def are_values_at_hand(*arrays):
    """Whether asking for PyTorch tensors' values is right, and cheap: on a CPU."""
    return is_plain(*arrays) and all(x.device.type == "cpu" for x in arrays)


def _has_memory(x):
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    try:
        # Those of `torch.func` are of the same class, and have none.
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _modes():
    """Functions that say whether something sees all that is computed.

    That is `torch.jit.trace`, or a mode of dispatch, of which only a private name of
    PyTorch tells; a release without it is answered as if there were one.
    """
    try:
        from torch.jit import is_tracing
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode
    except ImportError:
        return (lambda: True,)
    return is_tracing, is_in_torch_dispatch_mode
