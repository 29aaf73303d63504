"""Drop-in for `keras.layers.GroupQueryAttention`."""

import keras

from keras_rfattn.feature_maps import resolve
from keras_rfattn.feature_maps.arguments import is_integer
from keras_rfattn.layers.linear_attention import Packable
from keras_rfattn.ops.options import Options


@keras.saving.register_keras_serializable("keras_rfattn")
class GroupedQueryAttention(Packable, keras.layers.GroupQueryAttention):
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
        seed: Seed of the random vectors (and of the inactive dropout).
        **kwargs: The fields of `keras_rfattn.ops.Options`: `window`, `sliding`,
            `block_size`, `max_segments`, `temperature`, `softmax_heads`; and further
            arguments of `keras.layers.GroupQueryAttention`.
    """

    # What `restore_attention` makes of a layer.
    original_class = keras.layers.GroupQueryAttention

    def __init__(
        self,
        head_dim,
        num_query_heads,
        num_key_value_heads,
        *args,
        feature_map="favorpp",
        num_features=None,
        seed=None,
        **kwargs,
    ):
        options = Options.take(kwargs)
        sizes = {
            "head_dim": head_dim,
            "num_query_heads": num_query_heads,
            "num_key_value_heads": num_key_value_heads,
        }
        for name, size in sizes.items():
            if not is_integer(size) or size <= 0:
                raise ValueError(
                    f"`{name}` must be a positive integer. Received: {name}={size!r}."
                )
        super().__init__(
            head_dim, num_query_heads, num_key_value_heads, *args, seed=seed, **kwargs
        )
        feature_map = resolve(feature_map, num_features, seed, name="feature_map")
        self._set_mechanism(feature_map, options)

    def _kv_shape(self):
        return self.num_key_value_heads, self.head_dim
