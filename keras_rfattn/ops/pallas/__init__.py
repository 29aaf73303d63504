"""Attention by exponential features as Pallas kernels for TPUs, for JAX alone.

Queries and keys go in and outputs come out: features, running maxima and sums never
leave the chip's own memory, forward and backward. Only imported when asked for.
"""

from keras_rfattn.ops.pallas.attention import Side as Side
from keras_rfattn.ops.pallas.attention import attention as attention
