"""The Triton kernels of attention that is exact nearby and uses features beyond.

A block is a window of C tokens. Windows up to `NEAR` windows away are nearby: 0 for
attention within a window, 1 for sliding windows. Each program computes one window. It
loads the sums over all windows that are not nearby, and the keys of those that are.
Both are weighed relative to one shift, so features must estimate the weights
themselves: the terms of queries do not cancel here.

The first `SINKS` keys are exact for all windows. They lie in the first window, and are
left out of the sums (their term in `far_term` is `LOWEST`).
"""

import triton
import triton.language as tl

from keras_rfattn.fused.triton.memory import (
    before_group,
    before_tile,
    load,
    load_keys,
    load_map,
    load_numbers,
    load_queries,
    load_sums,
    program,
    store,
    store_map,
    store_numbers,
)
from keras_rfattn.fused.triton.parts import (
    LOWEST,
    divided,
    dot,
    dot_like,
    exponents,
    look_up,
    no_tokens,
)


@triton.jit
def merged(top, total, count, other_top, other_total, other_count):
    """Returns the sums over the tokens of two sums."""
    new = tl.maximum(top, other_top)
    scale, other_scale = tl.exp(top - new), tl.exp(other_top - new)
    total = total * scale[:, None] + other_total * other_scale[:, None]
    return new, total, count * scale + other_count * other_scale


@triton.jit
def load_far(
    before_top, before_total, before_count, after_top, after_total, after_count,
    lane, window, count, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    NEAR: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Loads the sums over windows that are not nearby, on the sides that are asked."""
    top, total, number = no_tokens(MP, VP)
    if BEFORE and window >= NEAR:
        top, total, number = load_sums(
            before_top, before_total, before_count, lane * count + window - NEAR,
            MP, VP,
        )  # fmt: skip
    if AFTER and window + NEAR < count:
        other = load_sums(
            after_top, after_total, after_count, lane * count + window + NEAR, MP, VP
        )
        top, total, number = merged(top, total, number, other[0], other[1], other[2])
    return top, total, number


@triton.jit
def logits_of(
    query, key, terms, offset, SCALE, IS_CAUSAL: tl.constexpr, C: tl.constexpr
):
    """Returns logits `(C, C)` of queries and the keys of a window `offset` away."""
    place = tl.arange(0, C)
    visible = (terms > LOWEST / 2)[None, :]
    if IS_CAUSAL:
        visible = visible & (place[:, None] >= place[None, :] + offset * C)
    return tl.where(visible, SCALE * dot(query, tl.trans(key)), LOWEST)


@triton.jit
def sink_logits_of(query, key, terms, is_seen, SCALE, SINKS: tl.constexpr):
    """Returns logits `(C, 16)` of queries and the first keys."""
    visible = (terms > LOWEST / 2) & (tl.arange(0, 16) < SINKS) & is_seen
    return tl.where(visible[None, :], SCALE * dot(query, tl.trans(key)), LOWEST)


@triton.jit
def weights_of(logits, shift):
    """Returns `exp(logits - shift)`, 0 for keys that a query does not see."""
    return tl.where(logits > LOWEST / 2, tl.exp(logits - shift[:, None]), 0.0)


@triton.jit
def with_nearby(found, whole, shift, logits, values):
    """Returns numerators, denominators and shifts with keys nearby added."""
    new = tl.maximum(shift, tl.max(logits, 1))
    scale = tl.exp(shift - new)
    weights = weights_of(logits, new).to(values.dtype)
    found = found * scale[:, None] + dot(weights, values)
    return found, whole * scale + tl.sum(weights.to(tl.float32), 1), new


@triton.jit
def windowed_outputs(
    query, key, vectors, bias, query_term, term, value,
    before_top, before_total, before_count, after_top, after_total, after_count,
    output, logs, SCALE,
    T, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
    SINKS: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
    GROUPS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes outputs and the logarithms of their denominators.

    Only the first tile of features adds the keys nearby.
    """
    lane, window, tile, batch, head, index = program(K, SHARED, TILES)
    of_query, base = load_map(vectors, bias, index, tile, H, M, TILES, GROUPS, HP, MP)
    top, total, count = load_far(
        before_top, before_total, before_count, after_top, after_total, after_count,
        lane, window, tl.num_programs(1), True, not CAUSAL, NEAR, MP, VP,
    )  # fmt: skip
    numbers = before_tile(tile, T, K * G, K, TILES)
    output += numbers * W
    logs += numbers
    query_term += before_group(tile, T, K * G, K, TILES, GROUPS)
    term += before_group(tile, T, K, K, TILES, GROUPS)
    token = window * C + tl.arange(0, C)
    for g in range(G):
        n = head * G + g
        x = load(query, batch, token, n, T, K * G, H, HP)
        queries = exponents(x, of_query, base)
        queries += load_numbers(query_term, batch, token, n, T, K * G, 0.0)[:, None]
        # The sums of features come first, the keys nearby one window after the other.
        found, whole, shift = look_up(
            queries, top, total, count, value.dtype.element_ty
        )
        if tile == 0:
            for offset in range(-NEAR, 1 if CAUSAL else NEAR + 1):
                others = token + offset * C
                inside = (others >= 0) & (others < T)
                others = tl.where(inside, others, T)
                keys, values, terms = load_keys(
                    key, value, term, batch, others, head, T, K, H, W, HP, VP
                )
                logits = logits_of(x, keys, terms, offset, SCALE, CAUSAL, C)
                found, whole, shift = with_nearby(found, whole, shift, logits, values)
            if SINKS > 0:
                first = tl.arange(0, 16)
                keys, values, terms = load_keys(
                    key, value, term, batch, first, head, T, K, H, W, HP, VP
                )
                logits = sink_logits_of(x, keys, terms, window > NEAR, SCALE, SINKS)
                found, whole, shift = with_nearby(found, whole, shift, logits, values)
        found, log = divided(found, whole, shift)
        found = found.to(output.dtype.element_ty)
        store(output, found, batch, token, n, T, K * G, W, VP)
        store_numbers(logs, log, batch, token, n, T, K * G)


@triton.jit
def windowed_query_gradients(
    query, key, vectors, bias, query_term, term, value, gradient, delta, logs,
    before_top, before_total, before_count, after_top, after_total, after_count,
    of_query, of_query_term, of_vectors, of_bias, of_sink_key, of_sink_value, SCALE,
    T, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
    SINKS: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
    GROUPS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of queries, and each window's of the query map and sinks."""
    lane, window, tile, batch, head, index = program(K, SHARED, TILES)
    queries_map, base = load_map(
        vectors, bias, index, tile, H, M, TILES, GROUPS, HP, MP
    )
    top, total, count = load_far(
        before_top, before_total, before_count, after_top, after_total, after_count,
        lane, window, tl.num_programs(1), True, not CAUSAL, NEAR, MP, VP,
    )  # fmt: skip
    numbers = before_tile(tile, T, K * G, K, TILES)
    of_query += numbers * H
    of_query_term += numbers
    query_term += before_group(tile, T, K * G, K, TILES, GROUPS)
    term += before_group(tile, T, K, K, TILES, GROUPS)
    token, first = window * C + tl.arange(0, C), tl.arange(0, 16)
    far = total.to(value.dtype.element_ty)
    map_slope = tl.zeros((HP, MP), tl.float32)
    bias_slope = tl.zeros((MP,), tl.float32)
    sink_key_slope = tl.zeros((16, HP), tl.float32)
    sink_value_slope = tl.zeros((16, VP), tl.float32)
    for g in range(G):
        n = head * G + g
        x, slopes, deltas, log = load_queries(
            query, gradient, delta, logs, batch, token, n, T, K * G, H, W, HP, VP
        )
        queries = exponents(x, queries_map, base)
        queries += load_numbers(query_term, batch, token, n, T, K * G, 0.0)[:, None]
        rows = tl.exp(queries + top[None, :] - log[:, None])
        slope = dot(slopes, tl.trans(far)) - deltas[:, None] * count[None, :]
        slope = rows * slope
        map_slope += dot_like(tl.trans(x.to(tl.float32)), slope, x)
        bias_slope += tl.sum(slope, 0)
        store_numbers(of_query_term, tl.sum(slope, 1), batch, token, n, T, K * G)
        found = dot_like(slope, tl.trans(queries_map), x)
        if tile == 0:
            for offset in range(-NEAR, 1 if CAUSAL else NEAR + 1):
                others = token + offset * C
                inside = (others >= 0) & (others < T)
                others = tl.where(inside, others, T)
                keys, values, terms = load_keys(
                    key, value, term, batch, others, head, T, K, H, W, HP, VP
                )
                logits = logits_of(x, keys, terms, offset, SCALE, CAUSAL, C)
                benefit = dot(slopes, tl.trans(values)) - deltas[:, None]
                benefit = SCALE * weights_of(logits, log) * benefit
                found += dot(benefit.to(keys.dtype), keys)
            if SINKS > 0:
                keys, values, terms = load_keys(
                    key, value, term, batch, first, head, T, K, H, W, HP, VP
                )
                logits = sink_logits_of(x, keys, terms, window > NEAR, SCALE, SINKS)
                weights = weights_of(logits, log)
                benefit = dot(slopes, tl.trans(values)) - deltas[:, None]
                benefit = (SCALE * weights * benefit).to(keys.dtype)
                found += dot(benefit, keys)
                sink_key_slope += dot(tl.trans(benefit), x)
                sink_value_slope += dot(tl.trans(weights.to(slopes.dtype)), slopes)
        found = found.to(of_query.dtype.element_ty)
        store(of_query, found, batch, token, n, T, K * G, H, HP)
    at = lane * tl.num_programs(1) + window
    store_map(
        of_vectors, of_bias, map_slope, bias_slope, at, tile, H, M, TILES, GROUPS,
        HP, MP,
    )  # fmt: skip
    if SINKS > 0:
        if tile == 0:
            row = (lane // TILES * tl.num_programs(1) + window).to(
                tl.int64
            ) * 16 + first
            of_key = of_sink_key + row[:, None] * HP + tl.arange(0, HP)[None, :]
            of_value = of_sink_value + row[:, None] * VP + tl.arange(0, VP)[None, :]
            tl.store(of_key, sink_key_slope)
            tl.store(of_value, sink_value_slope)


@triton.jit
def windowed_key_gradients(
    query, key, vectors, bias, far_term, term, value, gradient, delta, logs,
    before_top, before_total, before_count, after_top, after_total, after_count,
    of_key, of_term, of_value, of_vectors, of_bias, SCALE,
    T, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
    SHARED: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of keys and values, and each window's of the key map.

    The sums are those over queries of windows that are not nearby.
    """
    lane, window, tile, batch, head, index = program(K, SHARED, TILES)
    keys_map, base = load_map(vectors, bias, index, tile, H, M, TILES, GROUPS, HP, MP)
    top, total, count = load_far(
        before_top, before_total, before_count, after_top, after_total, after_count,
        lane, window, tl.num_programs(1), not CAUSAL, True, NEAR, MP, VP,
    )  # fmt: skip
    numbers = before_tile(tile, T, K, K, TILES)
    before = before_group(tile, T, K, K, TILES, GROUPS)
    far_term += before
    term += before
    token = window * C + tl.arange(0, C)
    x, values, terms = load_keys(
        key, value, term, batch, token, head, T, K, H, W, HP, VP
    )
    far_terms = load_numbers(far_term, batch, token, head, T, K, LOWEST)
    keys = exponents(x, keys_map, base) + far_terms[:, None]
    is_far = (far_terms > LOWEST / 2)[:, None]
    found = tl.where(is_far, tl.exp(keys + top[None, :]), 0.0)
    far = total.to(values.dtype)
    value_slope = dot(found.to(values.dtype), far)
    slope = found * (dot(values, tl.trans(far)) - count[None, :])
    at = lane * tl.num_programs(1) + window
    store_map(
        of_vectors, of_bias, dot_like(tl.trans(x.to(tl.float32)), slope, x),
        tl.sum(slope, 0), at, tile, H, M, TILES, GROUPS, HP, MP,
    )  # fmt: skip
    store_numbers(of_term + numbers, tl.sum(slope, 1), batch, token, head, T, K)
    key_slope = dot_like(slope, tl.trans(keys_map), x)
    if tile == 0:
        for offset in range(0 if CAUSAL else -NEAR, NEAR + 1):
            others = token + offset * C
            inside = (others >= 0) & (others < T)
            others = tl.where(inside, others, T)
            for g in range(G):
                n = head * G + g
                queries, slopes, deltas, log = load_queries(
                    query, gradient, delta, logs, batch, others, n, T, K * G, H, W,
                    HP, VP,
                )  # fmt: skip
                logits = logits_of(queries, x, terms, -offset, SCALE, CAUSAL, C)
                weights = weights_of(logits, log)
                value_slope += dot(tl.trans(weights.to(values.dtype)), slopes)
                benefit = dot(slopes, tl.trans(values)) - deltas[:, None]
                benefit = (SCALE * weights * benefit).to(x.dtype)
                key_slope += dot(tl.trans(benefit), queries)
    key_slope = key_slope.to(of_key.dtype.element_ty)
    store(of_key + numbers * H, key_slope, batch, token, head, T, K, H, HP)
    value_slope = value_slope.to(of_value.dtype.element_ty)
    store(of_value + numbers * W, value_slope, batch, token, head, T, K, W, VP)
