"""Drop-in for `keras.layers.GroupQueryAttention`."""

import keras

from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.multi_head_attention import named_map


@keras.saving.register_keras_serializable("keras_rfattn")
class GroupedQueryAttention(LinearAttention, keras.layers.GroupQueryAttention):
    """Grouped-query attention, linear in sequence length.

    Features of keys are computed once per key/value head and read by all query
    heads of its group. Same call signature and weights as
    `keras.layers.GroupQueryAttention`; differences as in `MultiHeadAttention`.

    Args:
        head_dim: Size of each head.
        num_query_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads.
        *args: Further arguments of `keras.layers.GroupQueryAttention`.
        feature_map: A registered name, a `FeatureMap` or its config.
        num_features: Number of random vectors, for a map given by name.
        block_size: Of the causal algorithm, 128 by default; changes no number.
        window: Optional number of tokens within which attention is exact.
        sliding: Whether the window before a query's own is exact too (and, without
            causality, the one after).
        seed: Seed of the random vectors (and of the inactive dropout).
        **kwargs: Further arguments of `keras.layers.GroupQueryAttention`.
    """

    def __init__(
        self,
        head_dim,
        num_query_heads,
        num_key_value_heads,
        *args,
        feature_map="favorpp",
        num_features=None,
        block_size=None,
        window=None,
        sliding=False,
        seed=None,
        **kwargs,
    ):
        super().__init__(
            head_dim, num_query_heads, num_key_value_heads, *args, seed=seed, **kwargs
        )
        feature_map = named_map(feature_map, num_features, seed)
        self._set_mechanism(feature_map, block_size, window, sliding)

    def _kv_shape(self):
        return self.num_key_value_heads, self.head_dim
