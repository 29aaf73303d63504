"""Drop-in replacement of `keras.layers.GroupQueryAttention`."""

import keras

from keras_rfattn.arguments import check_sizes
from keras_rfattn.feature_maps import DEFAULT, resolve
from keras_rfattn.layers.linear_attention import Packable
from keras_rfattn.ops.options import Options


@keras.saving.register_keras_serializable("keras_rfattn")
class GroupedQueryAttention(Packable, keras.layers.GroupQueryAttention):
    """Grouped-query attention whose cost is linear in sequence length.

    The features of keys are computed once for each key/value head, and all query heads
    of its group use them. The layer has the call signature and the weights of
    `keras.layers.GroupQueryAttention`. It differs from that layer in the same ways as
    `keras_rfattn.layers.MultiHeadAttention` from Keras': attention dropout is inactive,
    attention scores and general masks are refused, and a query that sees no key
    yields 0.

    Args:
        head_dim: Size of each head.
        num_query_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads.
        *args: Further arguments of `keras.layers.GroupQueryAttention`.
        feature_map: As in `keras_rfattn.layers.MultiHeadAttention`.
        num_features: As in `keras_rfattn.layers.MultiHeadAttention`.
        seed: Seed of the random vectors (and of the inactive dropout).
        self_attention: As in `keras_rfattn.layers.MultiHeadAttention`.
        **kwargs: The options of `keras_rfattn.ops.Options`, and further arguments of
            `keras.layers.GroupQueryAttention`.

    Call arguments:
        query: Array of shape `(B, T, D)`.
        value: Array of shape `(B, S, D)`.
        key: Array of shape `(B, S, D)`. If `None`, `value` is used.
        **kwargs: Further arguments of a call of `keras.layers.GroupQueryAttention`, and
            `segment_ids`, which `call` describes.

    Returns:
        Array of shape `(B, T, D)` in the compute dtype.

    Raises:
        ValueError: If a size is not a positive integer, or for the other reasons of
            `keras_rfattn.layers.MultiHeadAttention`.
    """

    # `restore_attention` turns the layer into one of this class.
    original_class = keras.layers.GroupQueryAttention

    def __init__(
        self,
        head_dim,
        num_query_heads,
        num_key_value_heads,
        *args,
        feature_map=DEFAULT,
        num_features=None,
        seed=None,
        self_attention=None,
        **kwargs,
    ):
        options = Options.take(kwargs)
        check_sizes(
            head_dim=head_dim,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
        )
        super().__init__(
            head_dim, num_query_heads, num_key_value_heads, *args, seed=seed, **kwargs
        )
        feature_map = resolve(feature_map, num_features, seed, name="feature_map")
        self._set_mechanism(feature_map, options, self_attention)

    def _kv_shape(self):
        return self.num_key_value_heads, self.head_dim
