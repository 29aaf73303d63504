"""The Triton kernels of the gradients; see `kernels` for parts."""

import triton
import triton.language as tl

from keras_rfattn.experimental.triton.memory import (
    blocks_of,
    load_keys,
    load_map,
    load_queries,
    load_sums,
    program,
    store,
    store_map,
    store_numbers,
)
from keras_rfattn.experimental.triton.parts import (
    LOWEST,
    SPAN,
    UNSEEN,
    add,
    dot,
    dot_like,
    excess_of,
    exponents,
    number_of,
    products_of_row,
    reference_of,
    row_of,
)


@triton.jit
def query_gradients(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    gradient, delta, logs, maximum, numerator, normalizer,
    of_query, of_vectors, of_bias,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of queries, and each part's gradients of their map."""
    lane, part, batch, head, index = program(K, SHARED)
    queries_map, query_base = load_map(query_vectors, query_bias, index, H, M, HP, MP)
    keys_map, key_base = load_map(key_vectors, key_bias, index, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part
    top, total, count = load_sums(
        maximum, numerator, normalizer, at if CAUSAL else lane, MP, VP
    )
    map_slope = tl.zeros((HP, MP), tl.float32)
    bias_slope = tl.zeros((MP,), tl.float32)
    place = tl.arange(0, C)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + place
        reference = top
        if CAUSAL:
            keys, values, terms = load_keys(
                key, value, term, batch, token, head, S, K, H, W, HP, VP
            )
            keys = exponents(keys, keys_map, key_base) + terms[:, None]
            visible = terms > LOWEST / 2
            reference = reference_of(top, keys, visible, C)
            excess, exceeds = excess_of(keys, reference, visible, C)
            beside = tl.exp(tl.minimum(excess, SPAN))
            causally = (place[:, None] >= place[None, :]) & visible[None, :]
        scale = tl.exp(top - reference)
        before = (total * scale[:, None]).to(value.dtype.element_ty)
        for g in range(G):
            n = head * G + g
            x, slopes, deltas, log = load_queries(
                query, gradient, delta, logs, batch, token, n, T, K * G, H, W, HP, VP
            )
            queries = exponents(x, queries_map, query_base)
            rows = tl.exp(queries + reference[None, :] - log[:, None])
            slope = dot(slopes, tl.trans(before))
            slope -= deltas[:, None] * (count * scale)[None, :]
            if CAUSAL:
                benefit = dot(slopes, tl.trans(values)) - deltas[:, None]
                benefit = tl.where(causally, benefit, 0.0)
                slope = rows * (slope + dot_like(benefit, beside, values))
                if tl.max(exceeds.to(tl.int32), 0) > 0:
                    for i in range(C):
                        if tl.max(tl.where(place == i, exceeds.to(tl.int32), 0), 0) > 0:
                            row = row_of(queries, i, C)
                            own = number_of(log, i, C)
                            products = products_of_row(row, keys, own, visible, i, C)
                            found = row_of(benefit, i, C)[:, None] * products
                            found = tl.sum(found, 0)
                            of_output = row_of(slopes.to(tl.float32), i, C)
                            far = tl.sum(total * of_output[None, :], 1)
                            far -= number_of(deltas, i, C) * count
                            found += tl.exp(row + top - own) * far
                            slope = tl.where(
                                (place == i)[:, None], found[None, :], slope
                            )
            else:
                slope = rows * slope
            map_slope += dot_like(tl.trans(x.to(tl.float32)), slope, x)
            bias_slope += tl.sum(slope, 0)
            found = dot_like(slope, tl.trans(queries_map), x).to(
                of_query.dtype.element_ty
            )
            store(of_query, found, batch, token, n, T, K * G, H, HP)
        if CAUSAL:
            ones = tl.full((C,), 1.0, tl.float32)
            top, total, count = add(top, total, count, keys, visible, values, ones)
    store_map(
        of_vectors, of_bias, map_slope, bias_slope, at, H, M, HP, MP,
    )  # fmt: skip


@triton.jit
def key_gradients(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    gradient, delta, logs, references, maximum, numerator, normalizer,
    of_key, of_value, of_term, of_vectors, of_bias,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of keys, values and terms, and each part's of the key map."""
    lane, part, batch, head, index = program(K, SHARED)
    queries_map, query_base = load_map(query_vectors, query_bias, index, H, M, HP, MP)
    keys_map, key_base = load_map(key_vectors, key_bias, index, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part
    top, total, count = load_sums(
        maximum, numerator, normalizer, at if CAUSAL else lane, MP, VP
    )
    map_slope = tl.zeros((HP, MP), tl.float32)
    bias_slope = tl.zeros((MP,), tl.float32)
    place = tl.arange(0, C)
    blocks = blocks_of(part, S, BLOCKS, C)
    for step in range(blocks):
        block = part * BLOCKS + blocks - 1 - step
        token = block * C + place
        x, values, terms = load_keys(
            key, value, term, batch, token, head, S, K, H, W, HP, VP
        )
        keys = exponents(x, keys_map, key_base) + terms[:, None]
        visible = terms > LOWEST / 2
        found = tl.where(visible[:, None], tl.exp(keys + top[None, :]), 0.0)
        far = total.to(values.dtype)
        value_slope = dot(found.to(values.dtype), far)
        slope = found * (dot(values, tl.trans(far)) - count[None, :])
        if CAUSAL:
            at_block = lane.to(tl.int64) * tl.num_programs(1) * BLOCKS + block
            reference = tl.load(references + at_block * MP + tl.arange(0, MP))
            excess, exceeds = excess_of(keys, reference, visible, C)
            beside = tl.exp(tl.minimum(excess, SPAN))
            causally = (place[:, None] >= place[None, :]) & visible[None, :]
            for g in range(G):
                n = head * G + g
                queries, slopes, deltas, log = load_queries(
                    query, gradient, delta, logs, batch, token, n, T, K * G, H, W,
                    HP, VP,
                )  # fmt: skip
                queries = exponents(queries, queries_map, query_base)
                rows = tl.exp(queries + reference[None, :] - log[:, None])
                rows = tl.where(exceeds[:, None], 0.0, rows)
                benefit = dot(slopes, tl.trans(values)) - deltas[:, None]
                benefit = tl.where(causally, benefit, 0.0)
                weights = dot_like(rows, tl.trans(beside), values)
                weights = tl.where(causally, weights, 0.0).to(values.dtype)
                value_slope += dot(tl.trans(weights), slopes)
                slope += beside * dot_like(tl.trans(benefit), rows, values)
                if tl.max(exceeds.to(tl.int32), 0) > 0:
                    for i in range(C):
                        if tl.max(tl.where(place == i, exceeds.to(tl.int32), 0), 0) > 0:
                            row = row_of(queries, i, C)
                            own = number_of(log, i, C)
                            products = products_of_row(row, keys, own, visible, i, C)
                            weight = tl.sum(products, 1)
                            of_output = row_of(slopes.to(tl.float32), i, C)
                            value_slope += weight[:, None] * of_output[None, :]
                            slope += row_of(benefit, i, C)[:, None] * products
                # Earlier blocks see the sums with these queries.
                queries -= log[:, None]
                top, total, count = add(
                    top, total, count, queries, log < UNSEEN, slopes, deltas
                )
        map_slope += dot_like(tl.trans(x.to(tl.float32)), slope, x)
        bias_slope += tl.sum(slope, 0)
        found = dot_like(slope, tl.trans(keys_map), x).to(of_key.dtype.element_ty)
        store(of_key, found, batch, token, head, S, K, H, HP)
        found = value_slope.to(of_value.dtype.element_ty)
        store(of_value, found, batch, token, head, S, K, W, VP)
        store_numbers(of_term, tl.sum(slope, 1), batch, token, head, S, K)
    store_map(
        of_vectors, of_bias, map_slope, bias_slope, at, H, M, HP, MP,
    )  # fmt: skip
