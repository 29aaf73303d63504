"""From projected queries, keys and values to an output: `attend`."""

import math

from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops.bidirectional import bidirectional
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.exact import exact_attention
from keras_rfattn.ops.local import Local
from keras_rfattn.ops.local import check_window as check_sizes
from keras_rfattn.ops.local import local_attention
from keras_rfattn.ops.local import mixed
from keras_rfattn.ops.local import near_keys
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.masks import interpret_mask


def attend(
    query,
    key,
    value,
    feature_map,
    mask=None,
    scale=None,
    block_size=None,
    window=None,
    sliding=False,
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
        block_size: Of the causal algorithm.
        window: Optional number of tokens: attention is exact within windows of so
            many, and by features beyond (`ops.local_attention`).
        sliding: Whether the window before a query's own is exact too (and, without
            causality, the one after).
        training: Whether stored statistics are updated.
        recorder: Called with `(query, key, value, query_mask, key_mask, causal)`,
            queries and keys scaled; may return an output to go on with.

    Returns:
        `(B, T, N, V)`. A row that sees no key is 0.

    Raises:
        ValueError: If the mask cannot be kept (`interpret_mask`), the map's statistics
            would leak the future, or its kernel cannot be exact within a window.
    """
    check_window(window, sliding, feature_map)
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
            query, key, value, feature_map, stats, mask, position, block_size, window,
            sliding,
        )  # fmt: skip
    if mask.query_mask is not None:
        output = ops.where(mask.query_mask[:, :, None, None], output, 0)
    return output


def _dispatch(
    query, key, value, feature_map, stats, mask, position, block_size, window, sliding
):
    """The algorithm for a map, a mask and a window; `position` is of a lone query."""
    kernel, key_mask = feature_map.exact_kernel, mask.key_mask
    if feature_map.is_exact:
        return exact_attention(query, key, value, kernel, key_mask, mask.causal)
    deferred = (
        feature_map.deferred("query_features", query, stats),
        feature_map.deferred("key_features", key, stats),
    )
    if window is None and mask.causal:
        return causal(*deferred, value, key_mask, block_size)
    if window is not None:
        local = Local(query, key, kernel, window, sliding)
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
    near = near_keys(key_mask, position, window, sliding)
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


def check_window(window, sliding, feature_map):
    """Raises `ValueError` unless a map's kernel can be exact within such a window."""
    check_sizes(window, sliding)
    if window is not None and feature_map.exact_kernel is None:
        raise ValueError(
            "A `window` of exact attention needs a kernel of which the features are "
            f"an estimate, softmax or polynomial. Received: window={window} for "
            f"{feature_maps.name_of(feature_map)!r}, of kernel {feature_map.kernel!r}."
        )
