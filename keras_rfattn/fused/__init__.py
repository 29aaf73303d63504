"""Fused kernels: attention computed by programs for one kind of hardware."""
