"""Attention by exponential features as Mosaic GPU kernels for NVIDIA GPUs, for JAX.

The kernels need Hopper's tensor cores (`wgmma`). The forward and the backward pass keep
features, running maxima and sums in registers and shared memory; only the gradients of
exponents go through memory. This package is imported only if it is asked for.
"""

from keras_rfattn.fused.mosaic.attention import attention as attention
