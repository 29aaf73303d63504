"""Triton kernels of linear attention by exponential features, for PyTorch on a GPU."""

from keras_rfattn.fused.triton.attention import attention

__all__ = ["attention"]
