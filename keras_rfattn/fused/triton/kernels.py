"""The Triton kernels of linear attention by exponential features.

A sequence is cut into parts of `BLOCKS` blocks of C tokens. `sum_keys` and
`sum_queries` sum each part, `scan` adds up the parts before (or after) each part, and
the other kernels walk through a part block by block, starting from these sums. All
parts run in parallel, so a sequence keeps the whole device busy, and only one state per
part is written to memory.

Features are cut into tiles too, so that a program holds few of them. Each tile is
attention of its own, and the outputs are joined afterwards by their denominators.

Arrays of tokens keep the layout of the model, `(B, T, heads, ·)`; results that tiles
add to have the tile as another axis in front. Axis 0 of the grid is a tile of a
key/value head of a row of the batch, axis 1 is a part.
"""

import triton
import triton.language as tl

from keras_rfattn.fused.triton.memory import (
    blocks_of,
    load,
    load_map,
    load_numbers,
    load_sums,
    store,
    store_numbers,
    store_sums,
)
from keras_rfattn.fused.triton.parts import (
    LOWEST,
    TINY,
    UNSEEN,
    add,
    dot,
    exponents,
    no_tokens,
    read,
    reference_of,
)


@triton.jit
def sum_keys(
    key, vectors, bias, term, value, maximum, numerator, normalizer,
    T, K, H, M, W, SHARED: tl.constexpr, TILES: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Sums the keys and values of each part."""
    lane, part = tl.program_id(0), tl.program_id(1)
    pair, tile = lane // TILES, lane % TILES
    batch, head = pair // K, pair % K
    weights, shift = load_map(
        vectors, bias, head if SHARED else pair, tile, H, M, HP, MP
    )
    top, total, count = no_tokens(MP, VP)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        terms = load_numbers(term, batch, token, head, T, K, LOWEST)
        keys = load(key, batch, token, head, T, K, H, HP)
        values = load(value, batch, token, head, T, K, W, VP)
        keys = exponents(keys, weights, shift) + terms[:, None]
        visible = terms > LOWEST / 2
        ones = tl.full((C,), 1.0, tl.float32)
        top, total, count = add(top, total, count, keys, visible, values, ones)
    at = lane * tl.num_programs(1) + part
    store_sums(maximum, numerator, normalizer, (top, total, count), at, MP, VP)


@triton.jit
def sum_queries(
    query, vectors, bias, gradient, delta, logs,
    maximum, numerator, normalizer,
    T, K, H, M, W, G: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Sums the queries of each part and the gradients of their numerators."""
    lane, part = tl.program_id(0), tl.program_id(1)
    pair, tile = lane // TILES, lane % TILES
    batch, head = pair // K, pair % K
    weights, base = load_map(
        vectors, bias, head if SHARED else pair, tile, H, M, HP, MP
    )
    top, total, count = no_tokens(MP, VP)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        for g in range(G):
            n = head * G + g
            queries = load(query, batch, token, n, T, K * G, H, HP)
            log = load_numbers(logs, batch, token, n, T, K * G, UNSEEN)
            deltas = load_numbers(delta, batch, token, n, T, K * G, 0.0)
            slopes = load(gradient, batch, token, n, T, K * G, W, VP)
            queries = exponents(queries, weights, base) - log[:, None]
            top, total, count = add(
                top, total, count, queries, log < UNSEEN, slopes, deltas
            )
    at = lane * tl.num_programs(1) + part
    store_sums(maximum, numerator, normalizer, (top, total, count), at, MP, VP)


@triton.jit
def scan(
    maximum, numerator, normalizer, to_maximum, to_numerator, to_normalizer, count,
    MODE: tl.constexpr, M: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds up the sums of parts: of those before each part, after it, or of all.

    A program adds `SIZE` of the V columns of the numerators. `MODE` is "before",
    "after" or "all", which stores one total per head.
    """
    pair, columns = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, M), columns * SIZE + tl.arange(0, SIZE)
    offset = row[:, None] * V + column[None, :]
    top = tl.full((M,), LOWEST, tl.float32)
    total, weight = tl.zeros((M, SIZE), tl.float32), tl.zeros((M,), tl.float32)
    for step in range(count):
        part = count - 1 - step if MODE == "after" else step
        at = (pair * count + part).to(tl.int64) * M
        if MODE != "all":
            tl.store(to_numerator + at * V + offset, total)
            if columns == 0:
                tl.store(to_maximum + at + row, top)
                tl.store(to_normalizer + at + row, weight)
        own = tl.load(maximum + at + row)
        new = tl.maximum(top, own)
        scale, own = tl.exp(top - new), tl.exp(own - new)
        found = tl.load(numerator + at * V + offset) * own[:, None]
        total = total * scale[:, None] + found
        weight = weight * scale + tl.load(normalizer + at + row) * own
        top = new
    if MODE == "all":
        at = pair.to(tl.int64) * M
        tl.store(to_numerator + at * V + offset, total)
        if columns == 0:
            tl.store(to_maximum + at + row, top)
            tl.store(to_normalizer + at + row, weight)


@triton.jit
def outputs(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    maximum, numerator, normalizer, output, logs, references,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes outputs, and what gradients need: logs and references.

    A log is that of the denominator of a query, `UNSEEN` if the query sees no key.
    """
    lane, part = tl.program_id(0), tl.program_id(1)
    pair, tile = lane // TILES, lane % TILES
    batch, head = pair // K, pair % K
    index = head if SHARED else pair
    of_query, query_base = load_map(
        query_vectors, query_bias, index, tile, H, M, HP, MP
    )
    of_key, key_base = load_map(key_vectors, key_bias, index, tile, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part if CAUSAL else lane
    top, total, count = load_sums(maximum, numerator, normalizer, at, MP, VP)
    numbers = tile.to(tl.int64) * (tl.num_programs(0) // (K * TILES)) * T * K * G
    output += numbers * W
    logs += numbers
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        if CAUSAL:
            terms = load_numbers(term, batch, token, head, S, K, LOWEST)
            keys = load(key, batch, token, head, S, K, H, HP)
            values = load(value, batch, token, head, S, K, W, VP)
            keys = exponents(keys, of_key, key_base) + terms[:, None]
            visible = terms > LOWEST / 2
            reference = reference_of(top, keys, visible, C)
            at_block = at * BLOCKS + block
            tl.store(references + at_block * MP + tl.arange(0, MP), reference)
        for g in range(G):
            n = head * G + g
            queries = load(query, batch, token, n, T, K * G, H, HP)
            queries = exponents(queries, of_query, query_base)
            if CAUSAL:
                found, whole, shifts = read(
                    queries, reference, top, total, count, keys, visible, values, C
                )
            else:
                raised = queries + top[None, :]
                shifts = tl.max(raised, 1)
                rows = tl.exp(raised - shifts[:, None])
                rows = rows.to(output.dtype.element_ty)
                found = dot(rows, total.to(rows.dtype))
                whole = tl.sum(rows.to(tl.float32) * count[None, :], 1)
            found = found / tl.where(whole > 0, whole, 1.0)[:, None]
            found = tl.where((whole > 0)[:, None], found, 0.0)
            found = found.to(output.dtype.element_ty)
            store(output, found, batch, token, n, T, K * G, W, VP)
            log = tl.where(whole > 0, shifts + tl.log(tl.maximum(whole, TINY)), UNSEEN)
            store_numbers(logs, log, batch, token, n, T, K * G)
        if CAUSAL:
            ones = tl.full((C,), 1.0, tl.float32)
            top, total, count = add(top, total, count, keys, visible, values, ones)
