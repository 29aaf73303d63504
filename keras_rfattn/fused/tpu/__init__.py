"""Attention by exponential features as Pallas kernels for TPUs; only for JAX.

The kernels read queries and keys and write outputs. Features, running maxima and sums
stay in the chip's own memory, in the forward and in the backward pass. This package is
imported only if it is asked for.
"""

from keras_rfattn.fused.tpu.attention import attention as attention
