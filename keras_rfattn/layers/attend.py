"""Computes the output of attention for all tokens of a sequence at once.

Shapes use B for the batch, T for the number of queries, S for the number of keys, K for
key/value heads, N for query heads (a multiple of K), H for the head dim and V for the
size of values.
"""

from keras import ops

import keras_rfattn.feature_maps as feature_maps
from keras_rfattn import fused
from keras_rfattn.backend import is_zero, where
from keras_rfattn.layers.attention import PLAIN, Attention
from keras_rfattn.layers.cached import among_keys
from keras_rfattn.layers.softmax_heads import with_softmax_heads
from keras_rfattn.ops.masks import check_lengths, check_prefix, interpret_mask, needed
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.packing import by_text
from keras_rfattn.ops.sink_logits import SinkMap


def attend(
    query,
    key,
    value,
    feature_map,
    mask=None,
    scale=None,
    options=None,
    recorder=None,
    softmax_kernel=PLAIN,
    sink_logits=None,
):
    """Computes linear attention of projected queries, keys and values.

    Args:
        query: Queries of shape `(B, T, N, H)`, not scaled.
        key: Keys of shape `(B, S, K, H)`, not scaled. N is a multiple of K.
        value: Values of shape `(B, S, K, V)`. Their dtype is the compute dtype.
        feature_map: A `FeatureMap` that is built for K heads of dim H.
        mask: `None` (no mask), an `AttentionMask`, or an array that
            `keras_rfattn.ops.interpret_mask` accepts.
        scale: Factor on `q · k`. If `None`, the map's default, which is `1/√H` for maps
            that estimate softmax attention.
        options: `keras_rfattn.ops.Options`, such as the window, the block size and the
            heads that stay softmax. If `None`, their defaults.
        recorder: Optional function that is called with the `Attention`. If it returns
            an array `(B, T, N, V)`, that is used as the output of the linear heads.
        softmax_kernel: `ops.Softmax` that softmax heads and teachers use; it holds the
            soft cap of the layer's logits.
        sink_logits: Optional array of shape `(N,)`; see `Attention`.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. The output of a query
        that sees no key is 0.

    Raises:
        ValueError: If the mask is not supported (see `interpret_mask`), or a window is
            given and the kernel of the map cannot be computed exactly.
    """
    options = Options() if options is None else options
    check_options(options, feature_map)
    mask = interpret_mask(mask, query.shape[1], key.shape[1])
    if any(is_zero(x) for x in (*query.shape[:2], key.shape[1])):
        # There is no query, or no key that it could see.
        return ops.zeros((*query.shape[:-1], value.shape[-1]), dtype=value.dtype)
    check_prefix(mask, options)
    if mask.offset is None:
        check_lengths(mask, query.shape[1], key.shape[1])
    if mask.segment_ids is not None:
        tokens, limit = (query, key, value), options.max_segments
        return by_text(
            attend, tokens, mask, limit, feature_map=feature_map, scale=scale,
            options=options, recorder=recorder, softmax_kernel=softmax_kernel,
            sink_logits=sink_logits,
        )  # fmt: skip
    if mask.causal and mask.offset is not None:
        *tokens, plain, taken = among_keys(query, key, value, mask, options.window)
        output = attend(
            *tokens, feature_map, plain, scale, options, recorder, softmax_kernel,
            sink_logits,
        )  # fmt: skip
        return _hidden(taken(output), mask.query_mask)
    if mask.key_mask is not None:
        key_mask = ops.broadcast_to(mask.key_mask, ops.shape(key)[:2])
        mask = mask.replace(key_mask=needed(key_mask))
    if mask.key_mask is not None:
        visible = ops.expand_dims(mask.key_mask, (2, 3))
        key, value = where(visible, key, 0), where(visible, value, 0)
    if scale is None:
        scale = feature_map.default_scale(query.shape[-1])
    if sink_logits is not None:
        feature_map = SinkMap(feature_map, sink_logits)
    call = Attention(
        query, key, value, mask, scale, feature_map, options, softmax_kernel,
        sink_logits,
    )  # fmt: skip
    output = None if recorder is None else recorder(call)
    output = call.linear() if output is None else output
    if not getattr(recorder, "answers_all_heads", False):
        output = with_softmax_heads(call, output)
    return _hidden(output, mask.query_mask)


def check_options(options, feature_map):
    """Raises `ValueError` for options that a map does not support."""
    name, reason = options.implementation, None
    if name in fused.KERNELS:
        reason = fused.kernels(name).obstacle(options, feature_map)
    if reason:
        raise ValueError(
            f"The {name.title()} kernels cannot answer this attention: {reason}. "
            f"Received: implementation={name!r}. Use 'auto' or 'xla'."
        )
    if options.sinks and options.window is None:
        raise ValueError(
            "`sinks` need a `window`: keys between the sinks and the window are "
            f"estimated by features. Received: sinks={options.sinks}, window=None. "
            "Pass a number of tokens as `window`, for example 64."
        )
    if options.window is not None and feature_map.exact_kernel is None:
        name = feature_maps.name_of(feature_map)
        names = [
            x
            for x in feature_maps.list()
            if feature_maps.class_of(x).kernel in ("softmax", "polynomial")
        ]
        raise ValueError(
            f"`window` must be `None` for {name!r}: attention within a window is "
            "exact, which needs a map whose kernel is softmax or polynomial, and its "
            f"kernel is {feature_map.kernel!r}. Received: window={options.window}. "
            f"Use window=None, or one of {names}."
        )


def _hidden(output, query_mask):
    """Sets the output to 0 for queries that are padding."""
    query_mask = needed(query_mask)
    if query_mask is None:
        return output
    return where(ops.expand_dims(query_mask, (2, 3)), output, 0)
