"""Layers that encode positions: rotary attention and sinusoidal embedding."""

import math

import keras
import numpy as np
from keras import ops


def angles(length, dim):
    """Returns position times frequency, `(length, dim / 2)`, float32."""
    frequencies = 10_000.0 ** (-2 * np.arange(dim // 2) / dim)
    positions = ops.cast(ops.arange(length), "float32")
    return positions[:, None] * ops.convert_to_tensor(frequencies, "float32")


def rotate(x):
    """Rotates each pair `(x_i, x_{i + H/2})` of `(B, T, N, H)` by a position's angle.

    Products of queries and keys then depend on the distance between their tokens.

    Reference:
        Su et al., "RoFormer" (2021), equation 34.
    """
    dim = x.shape[-1]
    angle = angles(ops.shape(x)[1], dim)[None, :, None]
    sine, cosine = ops.cast(ops.sin(angle), x.dtype), ops.cast(ops.cos(angle), x.dtype)
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    turned = left * cosine - right * sine, right * cosine + left * sine
    return ops.concatenate(turned, axis=-1)


@keras.saving.register_keras_serializable("keras_rfattn")
class RotaryProjection(keras.layers.EinsumDense):
    """Projection to queries or keys, followed by `rotate`."""

    def call(self, inputs, training=None):
        return rotate(super().call(inputs, training=training))


@keras.saving.register_keras_serializable("keras_rfattn")
class RotaryAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with rotary position embedding.

    The rotation is part of the query and key projections. The rest is Keras' unchanged
    attention, which any linear attention can replace.

    Raises:
        ValueError: If `key_dim` is odd.
    """

    def build(self, query_shape, value_shape, key_shape=None):
        if self._key_dim % 2:
            raise ValueError(
                "`key_dim` must be even, as rotary embedding turns pairs. "
                f"Received: key_dim={self._key_dim}."
            )
        super().build(query_shape, value_shape, key_shape)
        for projection in (self._query_dense, self._key_dense):
            projection.__class__ = RotaryProjection


@keras.saving.register_keras_serializable("keras_rfattn")
class SinusoidalEmbedding(keras.layers.Layer):
    """Scales token embeddings by `√D`, and adds sines and cosines of the position.

    Maps `(B, T, D)` to `(B, T, D)`. Embedding entries of variance 1/D suit tied
    logits; the factor makes them as large as the sines and cosines.

    Reference:
        Vaswani et al., "Attention is all you need" (2017), sections 3.4 and 3.5.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x):
        angle = angles(ops.shape(x)[1], x.shape[-1])
        waves = ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)
        return x * math.sqrt(x.shape[-1]) + ops.cast(waves, x.dtype)[None]

    def compute_output_shape(self, input_shape):
        return input_shape
