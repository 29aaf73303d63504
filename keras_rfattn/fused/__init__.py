"""Attention by programs for one kind of hardware.

Core has one of them, PyTorch's fused softmax on a CPU (`torch_cpu`), which `"auto"`
selects. Kernels that no timing supports yet are modules in `experimental/`, imported
when a user names them. Each has two functions: `obstacle(options, feature_map)`, which
returns why the kernels cannot run, or `None`; and `attention`, with the arguments of
`attention` below.
"""

import importlib

import keras

# Kernels by the name that `implementation` takes.
KERNELS = {
    "pallas": "keras_rfattn.experimental.tpu",
    "triton": "keras_rfattn.experimental.triton",
}


def kernels(name):
    """Returns the module of the kernels of this name."""
    return importlib.import_module(KERNELS[name])


def attention(features, value, local, key_mask, is_causal, options):
    """Computes attention `(B, T, N, V)` by fused programs, or returns `None`."""
    # `features` are those of queries `(B, T, N, H)` and keys `(B, S, K, H)`, without
    # sinks, `value` is `(B, S, K, V)`, all finite. `local` is the `Local` of a window,
    # or `None`.
    name = options.implementation
    if name in KERNELS:
        arguments = features, value, local, key_mask, is_causal, options
        return kernels(name).attention(*arguments)
    is_plain = name == "xla" or is_causal or options.sinks
    if is_plain or keras.backend.backend() != "torch":
        return None
    # Imported here, because PyTorch may be missing.
    from keras_rfattn.fused import torch_cpu

    return torch_cpu.attention(*features, value, local, key_mask)
