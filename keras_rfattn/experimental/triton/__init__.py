"""Triton kernels of linear attention by exponential features, for PyTorch on a GPU.

Measured: outputs and gradients in Triton's interpreter, against ordinary operations
(`tests/experimental/test_triton.py`); the bytes that the kernels move, about 2.5 times
the least possible with 64 features, causal (`benchmarks/triton_bytes.py`); registers,
of which none spills in the forward pass, while the gradients of keys spill 120 bytes a
thread with 64 features and 512 with 128 (`benchmarks/triton_kernels.py --tokens 32
--warps 8 --targets 90`). Not measured: any time, because no GPU was at hand. The
kernels return to core with a row of `benchmarks/gpu.py` in which they take at most
1/1.3 of the time of the ordinary operations.
"""

import importlib.util
import os

import keras

import keras_rfattn.feature_maps as feature_maps

# More features spill registers, and read tokens more than once.
MOST_FEATURES = 128


def obstacle(options, feature_map):
    """Returns why the kernels cannot run here, or `None` if they can."""
    if keras.backend.backend() != "torch":
        return f"they run on PyTorch, not on the backend {keras.backend.backend()!r}"
    if options.window is not None:
        return "they compute attention by features alone, without a window"
    name = feature_maps.name_of(feature_map)
    if not feature_map.has_exponents:
        return f"features of {name!r} are not exponentials of products"
    if feature_map.output_dim > MOST_FEATURES:
        width = feature_map.output_dim
        return f"they hold at most {MOST_FEATURES} features, and {name!r} has {width}"
    import torch

    if importlib.util.find_spec("triton") is None:
        return "the package `triton` is not installed"
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "PyTorch finds no CUDA device here"


def attention(features, value, local, key_mask, is_causal, options):
    """Computes attention; see `keras_rfattn.fused.attention`."""
    # Imported here, because Triton may be missing.
    from keras_rfattn.experimental.triton import convert

    return convert.attention(features, value, key_mask, is_causal, options)
