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
        windows: Numbers of tokens that a window may have, none if empty; `None` for
            any.
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
    "mosaic": Kernels("jax", "GPU", windows=(), sinks=0, groups=1),
    "triton": Kernels("torch", "GPU", windows=(16, 32, 64, 128), sinks=16, groups=2),
}

# The first release that the Mosaic kernels were tested with. Earlier ones have no
# interpreter of GPUs.
FIRST_JAX = (0, 12)


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
    if window is not None and sizes == ():
        return "they compute attention by features alone, without a window"
    if window is not None and sizes is not None and window not in sizes:
        return f"their windows have {sizes} tokens, not {window}"
    if options.sinks > kernels.sinks:
        return f"they have at most {kernels.sinks} sinks, not {options.sinks}"
    missing = {"mosaic": _missing_for_mosaic, "triton": _missing_for_triton}
    return missing[name]() if name in missing else None


def _missing_for_mosaic():
    import jax

    if jax.__version_info__ < FIRST_JAX:
        first = ".".join(map(str, FIRST_JAX))
        return f"they need JAX {first} or later, not {jax.__version__}"
    try:
        import jax.experimental.pallas.mosaic_gpu
    except ImportError as error:
        return f"Mosaic GPU cannot be imported here ({error})"
    if os.environ.get("MOSAIC_INTERPRET") == "1":
        return None
    capabilities = {
        str(device.compute_capability)
        for device in jax.devices()
        if device.platform == "gpu" and hasattr(device, "compute_capability")
    }
    if not capabilities:
        return "JAX finds no GPU here"
    if capabilities != {"9.0"}:
        # The instructions `wgmma` exist in no earlier or later generation.
        found = ", ".join(sorted(capabilities))
        return f"they need a Hopper GPU (compute capability 9.0), not {found}"
    return None


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
        ValueError: If kernels for JAX are requested under a `keras.distribution`.
    """
    # Programs are imported here, because the library of one backend may be missing.
    name = options.implementation
    if name in ("pallas", "mosaic") and keras.distribution.distribution() is not None:
        raise ValueError(
            f"The {name.title()} kernels run on one device, and are not divided over "
            f"several. Received: implementation={name!r} under a "
            "`keras.distribution`. Use 'auto' or 'xla'."
        )
    if name == "pallas":
        from keras_rfattn.fused import tpu

        return tpu.attention(tokens, deferred, value, key_mask, is_causal, options)
    if name == "mosaic":
        from keras_rfattn.fused import mosaic

        return mosaic.attention(deferred, value, key_mask, is_causal, options)
    if name == "triton":
        from keras_rfattn.fused import triton

        return triton.attention(deferred, value, key_mask, is_causal, options)
    if options.sinks:
        return None
    is_xla = name == "xla"
    if is_causal or is_xla or keras.backend.backend() != "torch":
        return None
    from keras_rfattn.fused import torch_cpu

    return torch_cpu.attention(*deferred, value, local, key_mask)
