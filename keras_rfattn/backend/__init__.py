"""Execution: operations whose best form depends on the backend or the device.

`common` has every operation, with its documentation. `jax`, `tensorflow` and `torch`
redefine those that need another form. Keras' backend is chosen once, so this file
chooses the operations once. No other folder, except `fused`, asks for the backend.
"""

import importlib
import types

# isort: split
import keras

from keras_rfattn.backend import common
from keras_rfattn.backend.sizes import fits, is_known, is_zero, product, smaller  # noqa: F401

try:
    _special = importlib.import_module(f"{__name__}.{keras.backend.backend()}")
except ModuleNotFoundError as error:
    # A backend of Keras without a file here uses `common` alone.
    if error.name != f"{__name__}.{keras.backend.backend()}":
        raise
    _special = types.SimpleNamespace()


def _chosen(name):
    return getattr(_special, name, getattr(common, name))


accumulated_matmul = _chosen("accumulated_matmul")
add_into = _chosen("add_into")
affine = _chosen("affine")
bounded = _chosen("bounded")
by_heads = _chosen("by_heads")
by_rows = _chosen("by_rows")
clip = _chosen("clip")
compiled = _chosen("compiled")
default_block_size = _chosen("default_block_size")
elementwise_max = _chosen("elementwise_max")
elementwise_min = _chosen("elementwise_min")
exclusive_scan = _chosen("exclusive_scan")
exp_into = _chosen("exp_into")
exp_of_difference = _chosen("exp_of_difference")
finite_tokens = _chosen("finite_tokens")
fold = _chosen("fold")
fused_softmax = _chosen("fused_softmax")
is_plain = _chosen("is_plain")
kept = _chosen("kept")
known_finite = _chosen("known_finite")
known_true = _chosen("known_true")
largest_of = _chosen("largest_of")
last_apart = _chosen("last_apart")
leading = _chosen("leading")
loops_over_blocks = _chosen("loops_over_blocks")
num_blocks = _chosen("num_blocks")
precise_einsum = _chosen("precise_einsum")
quotient = _chosen("quotient")
repeat_each = _chosen("repeat_each")
run_if = _chosen("run_if")
shifted = _chosen("shifted")
smallest_of = _chosen("smallest_of")
sums_weights_apart = _chosen("sums_weights_apart")
take_along = _chosen("take_along")
take_tokens = _chosen("take_tokens")
where = _chosen("where")
with_gradient = _chosen("with_gradient")
without_gradients = _chosen("without_gradients")

representable = common.representable
wide_dtype = common.wide_dtype
