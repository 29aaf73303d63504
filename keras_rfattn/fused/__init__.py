"""Fused kernels: attention computed by programs for one kind of hardware.

`layers.implementation` decides whether they are used. Each takes finite tokens, and
returns `None` where its hardware or its kernels do not apply.
"""

import keras


def has_tpu_kernels():
    """Returns whether the Pallas kernels can run with Keras' backend."""
    return keras.backend.backend() == "jax"


def on_a_tpu(query, key, value, key_mask, is_causal, options):
    """Computes linear attention by exponential features with the Pallas kernels.

    Args:
        query: Pair of scaled queries `(B, T, N, H)` and their `Exponents`, heads first.
        key: Pair of scaled keys `(B, S, K, H)` and their `Exponents`, heads first.
        value: Array of shape `(B, S, K, V)`.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.
        is_causal: Whether query i sees only keys `j <= i`.
        options: `ops.Options`.

    Returns:
        Array of shape `(B, T, N, V)`.
    """
    # Imported here, because JAX may not be installed with other backends.
    from keras_rfattn.fused import tpu

    sides = tpu.Side(*query), tpu.Side(*key)
    return tpu.attention(*sides, value, key_mask, is_causal, options)


def on_a_cpu(deferred, value, local=None, key_mask=None):
    """Computes exponential features by PyTorch's fused attention, without gradients.

    Args:
        deferred: `Deferred` features of the queries and the keys.
        value: Array of shape `(B, S, K, V)`.
        local: `ops.Local` for attention with a window, or `None`.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.

    Returns:
        Array of shape `(B, T, N, V)`, or `None` if this is not PyTorch on a CPU, the
        features are not exponentials, or a gradient is needed.
    """
    if keras.backend.backend() != "torch":
        return None
    from keras_rfattn.fused import torch_cpu

    return torch_cpu.attention(*deferred, value, local, key_mask)
