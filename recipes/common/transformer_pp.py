"""The Transformer++ language model of PolySketchFormer; not a recipe itself.

Kacham et al., "PolySketchFormer" (2024), appendices H and I. Sinusoids are added to the
token embeddings, and rotary position embedding is applied to queries and keys. The
feed-forward network is a gated one with as many weights as an ungated one of factor 4,
so that its inner size is 8/3 of the model's width. Embeddings are tied to the outputs.
"""

import math

import keras
import numpy as np
from keras import layers, ops

import keras_rfattn

# Numbers of layers and heads in the paper's appendix H, where heads have 64 dimensions.
SIZES = {"small": (12, 12), "medium": (24, 16), "large": (36, 20)}


def transformer_pp(
    size="small", attention="softmax", *, vocabulary_size=32_000, num_layers=None,
    num_heads=None, head_dim=64, **mechanism,
):  # fmt: skip
    """Builds a causal model from integer tokens `(B, T)` to float32 logits.

    `attention` is `"softmax"`, or the `feature_map` of `replace_attention`, and
    `mechanism` its further arguments. `num_layers` and `num_heads` are by default those
    of the paper's `size`.
    """
    num_layers, num_heads = num_layers or SIZES[size][0], num_heads or SIZES[size][1]
    width = num_heads * head_dim
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(
        vocabulary_size, width, reverse_dtype="float32", name="embedding",
        embeddings_initializer=keras.initializers.RandomNormal(stddev=width**-0.5),
    )  # fmt: skip
    x = SinusoidalEmbedding(name="positions")(embedding(tokens))
    for i in range(num_layers):
        x = Block(num_heads, head_dim, name=f"block_{i}")(x)
    x = layers.LayerNormalization(name="final_norm")(x)
    model = keras.Model(tokens, embedding(x, reverse=True), name="transformer_pp")
    if not (isinstance(attention, str) and attention == "softmax"):
        keras_rfattn.replace_attention(model, attention, **mechanism)
    return model


@keras.saving.register_keras_serializable("keras_rfattn")
class Block(layers.Layer):
    """A block of causal attention and a gated feed-forward network."""

    use_causal_mask = True

    def __init__(self, num_heads, head_dim, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.config = {"num_heads": num_heads, "head_dim": head_dim, "dropout": dropout}
        width = num_heads * head_dim
        options = {"use_bias": False, "dtype": self.dtype_policy}
        norm, dense = layers.LayerNormalization, layers.Dense
        self.attention_norm = norm(dtype=self.dtype_policy, name="norm_1")
        self.attention = RotaryAttention(
            num_heads, head_dim, name="attention", **options
        )
        self.feedforward_norm = norm(dtype=self.dtype_policy, name="norm_2")
        self.gate = dense(8 * width // 3, "gelu", name="gate", **options)
        self.up = dense(8 * width // 3, name="up", **options)
        self.down = dense(width, name="down", **options)
        self.dropout = layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.attention_norm, self.feedforward_norm, self.gate, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], self.gate.units))

    def call(self, x, training=None):
        h = self.attention_norm(x)
        h = self.attention(h, h, use_causal_mask=True, training=training)
        x = x + self.dropout(h, training=training)
        h = self.feedforward_norm(x)
        h = self.down(self.gate(h) * self.up(h))
        return x + self.dropout(h, training=training)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | self.config


def angles(length, dim):
    """Returns position times frequency, `(length, dim / 2)`, float32."""
    frequencies = 10_000.0 ** (-2 * np.arange(dim // 2) / dim)
    positions = ops.cast(ops.arange(length), "float32")
    return positions[:, None] * ops.convert_to_tensor(frequencies, "float32")


def rotate(x):
    """Rotates pairs `(x_i, x_{i + H/2})` of `(B, T, N, H)` by a position's angle."""
    angle = angles(ops.shape(x)[1], x.shape[-1])[None, :, None]
    sine, cosine = ops.cast(ops.sin(angle), x.dtype), ops.cast(ops.cos(angle), x.dtype)
    left, right = ops.split(x, 2, axis=-1)
    turned = left * cosine - right * sine, right * cosine + left * sine
    return ops.concatenate(turned, axis=-1)


@keras.saving.register_keras_serializable("keras_rfattn")
class RotaryProjection(layers.EinsumDense):
    """Projection to queries or keys, followed by `rotate`."""

    def call(self, inputs, training=None):
        return rotate(super().call(inputs, training=training))


@keras.saving.register_keras_serializable("keras_rfattn")
class RotaryAttention(layers.MultiHeadAttention):
    """Keras' attention whose query and key projections rotate their outputs."""

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        for projection in (self._query_dense, self._key_dense):
            projection.__class__ = RotaryProjection


@keras.saving.register_keras_serializable("keras_rfattn")
class SinusoidalEmbedding(layers.Layer):
    """Scales embeddings by the root of their width, and adds sinusoids."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x):
        angle = angles(ops.shape(x)[1], x.shape[-1])
        waves = ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)
        return x * math.sqrt(x.shape[-1]) + ops.cast(waves, x.dtype)[None]

    def compute_output_shape(self, input_shape):
        return input_shape
