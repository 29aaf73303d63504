"""Drop-in replacements of Keras' multi-head and grouped-query attention."""

import keras

from keras_rfattn.arguments import check_sizes
from keras_rfattn.feature_maps import DEFAULT, resolve
from keras_rfattn.layers.linear_attention import Packable
from keras_rfattn.ops.options import Options


@keras.saving.register_keras_serializable("keras_rfattn")
class MultiHeadAttention(Packable, keras.layers.MultiHeadAttention):
    """Multi-head attention whose cost is linear in sequence length.

    The layer has the call signature, projections and weight names of
    `keras.layers.MultiHeadAttention`, and can load its weights. There are four
    differences:

    - Attention dropout stays in the config, but is inactive.
    - `return_attention_scores=True` raises.
    - `attention_mask` must express key padding, causality or both (see
      `keras_rfattn.ops.interpret_mask`).
    - The output of a query that sees no key is 0.

    Args:
        num_heads: Number of heads.
        key_dim: Size of each head for query and key.
        *args: Further arguments of `keras.layers.MultiHeadAttention`.
        feature_map: A registered name, a `FeatureMap` or its config. Defaults to
            `feature_maps.DEFAULT`, the map of `replace_attention`.
        num_features: Number of random vectors of a map given by name. Defaults to twice
            the head dim for most maps.
        seed: Seed of the random vectors (and of the inactive dropout).
        self_attention: Whether queries, keys and values are the same tokens. Maps that
            measure the sequence, windows without a causal mask and packed texts need to
            know. `None` lets the graph of a Functional model tell, or else the objects
            of the call; a compiled call of separate arguments is like earlier calls.
            Calls with fewer or more keys than queries are cross-attention.
        **kwargs: The options of `keras_rfattn.ops.Options`, such as `window`, and
            further arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        **kwargs: The arguments of a call of `keras.layers.MultiHeadAttention`, and
            `segment_ids`, which `call` describes.

    Raises:
        ValueError: If an argument is invalid, or `num_features` is given together with
            a map or a config.

    Examples:
        >>> layer = keras_rfattn.layers.MultiHeadAttention(
        ...     num_heads=2, key_dim=8, feature_map="favorplus", num_features=32)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x, use_causal_mask=True).shape)
        (1, 10, 16)
    """

    # `restore_attention` turns the layer into one of this class.
    original_class = keras.layers.MultiHeadAttention

    def __init__(
        self,
        num_heads,
        key_dim,
        *args,
        feature_map=DEFAULT,
        num_features=None,
        seed=None,
        self_attention=None,
        **kwargs,
    ):
        options = Options.take(kwargs)
        check_sizes(num_heads=num_heads, key_dim=key_dim)
        # Keras refuses the integers of NumPy.
        super().__init__(int(num_heads), int(key_dim), *args, seed=seed, **kwargs)
        feature_map = resolve(feature_map, num_features, seed, name="feature_map")
        self._set_mechanism(feature_map, options, self_attention)


@keras.saving.register_keras_serializable("keras_rfattn")
class GroupedQueryAttention(Packable, keras.layers.GroupQueryAttention):
    """Grouped-query attention whose cost is linear in sequence length.

    The features of keys are computed once for each key/value head, and all query heads
    of its group use them. The layer has the call signature and the weights of
    `keras.layers.GroupQueryAttention`. It differs from that layer in the same ways as
    `MultiHeadAttention` from Keras': attention dropout is inactive,
    attention scores and general masks are refused, and a query that sees no key
    yields 0.

    Args:
        head_dim: Size of each head.
        num_query_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads.
        *args: Further arguments of `keras.layers.GroupQueryAttention`.
        feature_map, num_features, seed, self_attention: As in `MultiHeadAttention`.
        **kwargs: The options of `keras_rfattn.ops.Options`, and further arguments of
            `keras.layers.GroupQueryAttention`.

    Arguments of a call, output and errors are those of `MultiHeadAttention`.
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
