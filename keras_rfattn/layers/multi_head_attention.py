"""Drop-in for `keras.layers.MultiHeadAttention`."""

import keras

from keras_rfattn.feature_maps import resolve
from keras_rfattn.layers.linear_attention import Packable
from keras_rfattn.ops.options import Options


@keras.saving.register_keras_serializable("keras_rfattn")
class MultiHeadAttention(Packable, keras.layers.MultiHeadAttention):
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
        seed: Seed of the random vectors (and of the inactive dropout).
        **kwargs: The fields of `keras_rfattn.ops.Options`: `window`, `sliding`,
            `block_size`, `max_segments`, `temperature`, `softmax_heads`; and further
            arguments of `keras.layers.MultiHeadAttention`.

    Example:
    ```python
    layer = keras_rfattn.layers.MultiHeadAttention(8, 64, feature_map="favorplus")
    y = layer(x, x, use_causal_mask=True)
    ```
    """

    # What `restore_attention` makes of a layer.
    original_class = keras.layers.MultiHeadAttention

    def __init__(
        self,
        num_heads,
        key_dim,
        *args,
        feature_map="favorpp",
        num_features=None,
        seed=None,
        **kwargs,
    ):
        options = Options.take(kwargs)
        super().__init__(num_heads, key_dim, *args, seed=seed, **kwargs)
        feature_map = resolve(feature_map, num_features, seed, name="feature_map")
        self._set_mechanism(feature_map, options)
