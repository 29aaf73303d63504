"""Fused kernels: attention computed by programs for one kind of hardware."""

import importlib.util
import os
from typing import NamedTuple

import keras


class Kernels(NamedTuple):
    """What kernels need and support.

    Attributes:
        backend: Name of the Keras backend.
        device: Kind of device.
        windows: Numbers of tokens that a window may have; `None` for any.
        sinks: Largest number of sinks.
        groups: Largest number of groups of features (`FeatureMap.exponent_groups`).
    """

    backend: str
    device: str
    windows: tuple | None
    sinks: int
    groups: int


KERNELS = {
    "pallas": Kernels("jax", "TPU", windows=None, sinks=0, groups=1),
    "triton": Kernels("torch", "GPU", windows=(16, 32, 64, 128), sinks=16, groups=2),
}


def own_kernels():
    """Returns the name of the kernels for the backend, else of those for JAX."""
    own = [x for x in KERNELS if KERNELS[x].backend == keras.backend.backend()]
    return own[0] if own else "pallas"


def obstacle(name, options):
    """Returns why kernels cannot run here with these options, or `None` if they can."""
    kernels, backend = KERNELS[name], keras.backend.backend()
    if kernels.backend != backend:
        return f"they run on the backend {kernels.backend!r}, not on {backend!r}"
    window, sizes = options.window, kernels.windows
    if window is not None and sizes is not None and window not in sizes:
        return f"their windows have {sizes} tokens, not {window}"
    if options.sinks > kernels.sinks:
        return f"they have at most {kernels.sinks} sinks, not {options.sinks}"
    return _missing_for_triton() if name == "triton" else None


def _missing_for_triton():
    import torch

    if importlib.util.find_spec("triton") is None:
        return "the package `triton` is not installed"
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "PyTorch finds no CUDA device here"


def attention(tokens, deferred, value, local, key_mask, is_causal, options):
    """Computes attention by fused kernels, if the options and the device allow it.

    Args:
        tokens: Scaled queries `(B, T, N, H)` and keys `(B, S, K, H)`, all finite.
        deferred: The `Deferred` features of the queries and the keys, without sinks.
        value: Array of shape `(B, S, K, V)`, finite.
        local: The `ops.Local` if the options have a window, else `None`.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.
        is_causal: Whether query i sees only keys `j <= i`.
        options: `ops.Options`.

    Returns:
        Array of shape `(B, T, N, V)`, or `None` if ordinary operations should be used.

    Raises:
        ValueError: If Pallas kernels are requested under a `keras.distribution`.
    """
    # Programs are imported here, because the library of one backend may be missing.
    if options.implementation == "pallas":
        from keras_rfattn.fused import tpu

        if keras.distribution.distribution() is not None:
            raise ValueError(
                "The Pallas kernels run on one device, and are not divided over "
                "several. Received: implementation='pallas' under a "
                "`keras.distribution`. Use 'auto' or 'xla'."
            )
        return tpu.attention(tokens, deferred, value, key_mask, is_causal, options)
    if options.implementation == "triton":
        from keras_rfattn.fused import triton

        return triton.attention(deferred, value, key_mask, is_causal, options)
    if options.sinks:
        return None
    is_xla = options.implementation == "xla"
    if is_causal or is_xla or keras.backend.backend() != "torch":
        return None
    from keras_rfattn.fused import torch_cpu

    return torch_cpu.attention(*deferred, value, local, key_mask)
