"""The decoder-only Transformer++ of the PolySketchFormer paper, for any mechanism."""

import keras
from keras import layers

from keras_rfattn.feature_maps.arguments import is_integer
from keras_rfattn.models.matching import check_mechanism
from keras_rfattn.models.replace import replace_attention
from keras_rfattn.models.transformer_pp.positions import (
    RotaryAttention,
    SinusoidalEmbedding,
)

# The sizes of the paper's appendix H, where every head has 64 dimensions.
SIZES = {
    "small": {"num_layers": 12, "num_heads": 12},
    "medium": {"num_layers": 24, "num_heads": 16},
    "large": {"num_layers": 36, "num_heads": 20},
}


def transformer_pp(
    size="small",
    attention="softmax",
    *,
    vocabulary_size=32_000,
    num_layers=None,
    num_heads=None,
    head_dim=64,
    dropout=0.0,
    dtype=None,
    **mechanism,
):
    """Builds a causal language model.

    The token embeddings are tied to the output projection. Sinusoidal positions are
    added to the embeddings, and rotary position embedding is applied to queries and
    keys. Each residual branch begins with layer normalization. The feed-forward
    network is a GELU-gated linear unit with as many parameters as an ungated one of
    factor 4, so its inner size is 8/3 of the model width. (With an inner size of 4
    times the width, the parameter counts differ from the paper's appendix H.)

    Args:
        size: `"small"` (default), `"medium"` or `"large"`. Sets the default numbers of
            layers and heads.
        attention: `"softmax"`, or a value that `replace_attention` accepts as
            `feature_map`, such as a name or
            `feature_maps.PolySketchLearned(32, degree=8)`.
        vocabulary_size: Number of tokens in the vocabulary.
        num_layers: Number of blocks; `None` uses the number of `size`.
        num_heads: Number of heads; `None` uses the number of `size`.
        head_dim: Size of a head, which must be even. The width of the model is
            `num_heads * head_dim`.
        dropout: Dropout rate after each residual branch.
        dtype: Dtype policy of the layers; `None` uses the global policy.
        **mechanism: Further arguments of `replace_attention`: `num_features`,
            `window`, `sliding`, `block_size`, `seed`, ...

    Returns:
        A functional Keras model that maps integer tokens `(B, T)` to float32 logits
        `(B, T, vocabulary_size)`.

    Raises:
        ValueError: If `size` or `attention` is unknown, a number is not positive,
            `head_dim` is odd, arguments of a mechanism are given for softmax
            attention, or `replace_attention` raises.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), appendices H and I.

    Examples:
        >>> model = keras_rfattn.models.transformer_pp(
        ...     attention="favorplus", vocabulary_size=20, num_layers=1, num_heads=2,
        ...     head_dim=8, num_features=16)
        >>> tuple(model(np.array([[1, 2, 3]])).shape)
        (1, 3, 20)
    """
    if size not in SIZES:
        raise ValueError(
            f"`size` must be one of {list(SIZES)}. Received: size={size!r}."
        )
    is_softmax = isinstance(attention, str) and attention == "softmax"
    if is_softmax and mechanism:
        raise ValueError(
            f"Softmax attention takes no {sorted(mechanism)}. Received: "
            f"attention='softmax' and {mechanism}. Name a linear mechanism."
        )
    if not is_softmax:
        try:
            check_mechanism(attention)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"`attention` must be 'softmax' or a feature map. {error}"
            ) from None
    num_layers = SIZES[size]["num_layers"] if num_layers is None else num_layers
    num_heads = SIZES[size]["num_heads"] if num_heads is None else num_heads
    sizes = (num_layers, num_heads, head_dim)
    if not all(is_integer(x) and x > 0 for x in sizes) or head_dim % 2:
        raise ValueError(
            "`num_layers`, `num_heads` and `head_dim` must be positive integers, and "
            f"`head_dim` even. Received: num_layers={num_layers!r}, "
            f"num_heads={num_heads!r}, head_dim={head_dim!r}."
        )
    dim = num_heads * head_dim

    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(
        vocabulary_size,
        dim,
        dtype=dtype,
        reverse_dtype="float32",
        name="embedding",
        embeddings_initializer=keras.initializers.RandomNormal(stddev=dim**-0.5),
    )
    x = SinusoidalEmbedding(dtype=dtype, name="positions")(embedding(tokens))
    for i in range(num_layers):
        block = Block(num_heads, head_dim, dropout, dtype=dtype, name=f"block_{i}")
        x = block(x)
    x = layers.LayerNormalization(dtype=dtype, name="final_norm")(x)
    model = keras.Model(tokens, embedding(x, reverse=True), name="transformer_pp")
    if not is_softmax:
        replace_attention(model, attention, **mechanism)
    return model


@keras.saving.register_keras_serializable("keras_rfattn")
class Block(layers.Layer):
    """Transformer block of causal attention and a gated feed-forward network.

    Both are residual branches that begin with layer normalization.

    Args:
        num_heads: Number of heads.
        head_dim: Size of a head, which must be even.
        dropout: Dropout rate after each residual branch.
    """

    use_causal_mask = True

    def __init__(self, num_heads, head_dim, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads, self.head_dim, self.rate = num_heads, head_dim, dropout
        dim, dtype = num_heads * head_dim, self.dtype_policy
        inner = 8 * dim // 3

        def dense(units, name, activation=None):
            return layers.Dense(
                units, activation, use_bias=False, dtype=dtype, name=name
            )

        self.attention_norm = layers.LayerNormalization(dtype=dtype, name="norm_1")
        self.attention = RotaryAttention(
            num_heads, head_dim, use_bias=False, dtype=dtype, name="attention"
        )
        self.feedforward_norm = layers.LayerNormalization(dtype=dtype, name="norm_2")
        self.gate, self.up = dense(inner, "gate", "gelu"), dense(inner, "up")
        self.down = dense(dim, "down")
        self.dropout = layers.Dropout(dropout, dtype=dtype)

    def build(self, input_shape):
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.feedforward_norm.build(input_shape)
        self.gate.build(input_shape)
        self.up.build(input_shape)
        self.down.build((*input_shape[:-1], self.gate.units))

    def call(self, x, training=None):
        """Maps `(B, T, D)` to `(B, T, D)`."""
        h = self.attention_norm(x)
        h = self.attention(h, h, use_causal_mask=True, training=training)
        x = x + self.dropout(h, training=training)
        h = self.feedforward_norm(x)
        h = self.down(self.gate(h) * self.up(h))
        return x + self.dropout(h, training=training)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "dropout": self.rate,
        }
