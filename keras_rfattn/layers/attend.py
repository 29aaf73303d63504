"""The parallel pass: projected queries, keys and values become an output."""

import math

from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops.bidirectional import bidirectional
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.masks import interpret_mask
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.windowed import Local
from keras_rfattn.ops.windowed import local_attention
from keras_rfattn.ops.windowed import mixed
from keras_rfattn.ops.windowed import near_keys


def attend(
    query,
    key,
    value,
    feature_map,
    mask=None,
    scale=None,
    options=None,
    training=False,
    recorder=None,
):
    """Linear attention of projected queries, keys and values.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, V)`.
        feature_map: A `FeatureMap` built for K heads of dim H.
        mask: `None`, an `AttentionMask` or what `interpret_mask` takes.
        scale: Factor on `q · k`; the map's default if `None`.
        options: `ops.Options`: window and block size.
        training: Whether stored statistics are updated.
        recorder: Called with `(query, key, value, query_mask, key_mask, causal)`,
            queries and keys scaled; may return an output to go on with.

    Returns:
        `(B, T, N, V)`. A row that sees no key is 0.

    Raises:
        ValueError: If the mask cannot be kept (`interpret_mask`), the map's statistics
            would leak the future, or its kernel cannot be exact within a window.
    """
    options = Options() if options is None else options
    check_window(options, feature_map)
    mask = interpret_mask(mask, query.shape[1], key.shape[1])
    if 0 in (*query.shape[:2], key.shape[1]):
        # No query, or no key to see.
        return ops.zeros((*query.shape[:-1], value.shape[-1]), dtype=value.dtype)
    position = mask.offset if mask.causal else None
    if position is not None:
        query, key, value, mask = _apply_offset(query, key, value, mask)
    if mask.causal:
        position = None
    key_mask, query_mask = mask.key_mask, mask.query_mask
    if key_mask is not None:
        key_mask = ops.broadcast_to(key_mask, ops.shape(key)[:2])
        mask = mask.replace(key_mask=key_mask)
        visible = key_mask[:, :, None, None]
        key, value = ops.where(visible, key, 0), ops.where(visible, value, 0)
        if query_mask is None and mask.self_attention:
            query_mask = key_mask
    if scale is None:
        scale = feature_map.default_scale(query.shape[-1])
    side = math.sqrt(scale)
    wide = "float64" if query.dtype == "float64" else "float32"
    query, key = ops.cast(query, wide), ops.cast(key, wide)
    output = None
    if recorder is not None:
        recorded = query * side, key * side, value, query_mask, key_mask, mask.causal
        output = recorder(*recorded)
    if output is None:
        query, key = feature_map.prepare(query, key)
        query, key = query * side, key * side
        partial = mask.causal or not mask.self_attention
        stats = feature_map.statistics(
            query, key, query_mask, key_mask, causal=partial, training=training
        )
        output = _dispatch(
            query, key, value, feature_map, stats, mask, position, options
        )
    if mask.query_mask is not None:
        output = ops.where(mask.query_mask[:, :, None, None], output, 0)
    return output


def _dispatch(query, key, value, feature_map, stats, mask, position, options):
    """The algorithm for a map, a mask and a window; `position` is of a lone query."""
    kernel, key_mask, window = feature_map.exact_kernel, mask.key_mask, options.window
    if feature_map.is_exact:
        return exact_attention(query, key, value, kernel, key_mask, mask.causal)
    deferred = (
        feature_map.deferred("query_features", query, stats),
        feature_map.deferred("key_features", key, stats),
    )
    if window is None and mask.causal:
        return causal(*deferred, value, key_mask, options.block_size)
    if window is not None:
        local = Local(query, key, kernel, window, options.sliding)
        if mask.causal or mask.self_attention:
            return local_attention(*deferred, value, local, key_mask, mask.causal)
        if position is None:
            raise ValueError(
                "A `window` needs self-attention, where queries and keys are the same "
                f"tokens. Received: window={window} in cross-attention. Leave such "
                "layers out (`exclude=`)."
            )
    features = tuple(x.compute() for x in deferred)
    if window is None:
        return bidirectional(*features, value, key_mask)
    near = near_keys(key_mask, position, window, options.sliding)
    return mixed(*features, value, key_mask, near, local)


def _apply_offset(query, key, value, mask):
    """Cached decoding: query i, at position `offset + i`, sees keys up to itself."""
    length = ops.shape(query)[1]
    plain = mask.replace(offset=None)
    if isinstance(mask.offset, int) and mask.offset == 0:
        if mask.key_mask is not None:
            plain = plain.replace(key_mask=mask.key_mask[:, :length])
        return query, key[:, :length], value[:, :length], plain
    positions = ops.arange(ops.shape(key)[1])
    if query.shape[1] == 1:
        past = ops.cast(positions, "int32") <= ops.cast(mask.offset, "int32")
        past = ops.broadcast_to(past[None], (ops.shape(key)[0], ops.shape(key)[1]))
        if mask.key_mask is not None:
            past = past & mask.key_mask
        # Still attention over a part of the tokens: `self_attention` stays False,
        # and no statistic of them is taken.
        plain = AttentionMask(key_mask=past, query_mask=mask.query_mask)
        return query, key, value, plain
    raise ValueError(
        "Cached decoding takes one token at a time after the prompt. Received: "
        f"{length} queries at cache index {mask.offset}. Use a sampler that feeds "
        "one token per step."
    )


def check_window(options, feature_map):
    """Raises `ValueError` unless a map's kernel can be exact within a window."""
    if options.window is not None and feature_map.exact_kernel is None:
        raise ValueError(
            "A `window` of exact attention needs a kernel of which the features are an "
            f"estimate, softmax or polynomial. Received: window={options.window} for "
            f"{feature_maps.name_of(feature_map)!r}, of kernel {feature_map.kernel!r}."
        )
