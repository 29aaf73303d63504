"""Drop-in for `keras.layers.MultiHeadAttention`."""

import keras

from keras_rfattn import feature_maps
from keras_rfattn.layers.attention import LinearAttention


@keras.saving.register_keras_serializable("keras_rfattn")
class MultiHeadAttention(LinearAttention, keras.layers.MultiHeadAttention):
    """Multi-head attention, linear in sequence length.

    Same call signature, projections and weight names as
    `keras.layers.MultiHeadAttention`; weights load from one into the other.
    Differences: attention dropout is kept in the config and inactive;
    `return_attention_scores` raises; `attention_mask` must be key padding, causal
    or both (`keras_rfattn.ops.interpret_mask`); a row that sees no key is 0.

    Args:
        num_heads: Number of heads.
        key_dim: Size of each head for query and key.
        *args: Further arguments of `keras.layers.MultiHeadAttention`.
        feature_map: A registered name, a `FeatureMap` or its config.
        num_features: Number of random vectors, for a map given by name.
        block_size: Of the causal algorithm, 128 by default; changes no number.
        window: Optional number of tokens within which attention is exact.
        sliding: Whether the window before a query's own is exact too (and, without
            causality, the one after).
        seed: Seed of the random vectors (and of the inactive dropout).
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`.

    Example:
    ```python
    layer = keras_rfattn.layers.MultiHeadAttention(8, 64, feature_map="favorplus")
    y = layer(x, x, use_causal_mask=True)
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        *args,
        feature_map="favorpp",
        num_features=None,
        block_size=None,
        window=None,
        sliding=False,
        seed=None,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, *args, seed=seed, **kwargs)
        feature_map = named_map(feature_map, num_features, seed)
        self._set_mechanism(feature_map, block_size, window, sliding)


def named_map(feature_map, num_features, seed):
    """The map a layer was asked for; `seed` applies to one given by name."""
    if isinstance(feature_map, str):
        return feature_maps.get(
            feature_map, num_features=num_features, seed=seed, name="feature_map"
        )
    return feature_maps.get(feature_map, num_features=num_features)
