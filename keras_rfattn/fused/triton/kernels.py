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

from keras_rfattn.fused.triton.parts import (
    LOWEST,
    SPAN,
    TINY,
    UNSEEN,
    add,
    dot,
    dot_like,
    excess_of,
    exponents,
    no_tokens,
    number_of,
    products_of_row,
    read,
    reference_of,
    row_of,
)


@triton.jit
def blocks_of(part, length, BLOCKS: tl.constexpr, C: tl.constexpr):
    """Returns the number of blocks of a part; the last part may have fewer."""
    return tl.minimum(BLOCKS, tl.cdiv(length - part * BLOCKS * C, C))


@triton.jit
def load(x, batch, token, head, T, HEADS, WIDTH, SIZE: tl.constexpr):
    """Loads tokens `(C, SIZE)` of a head from an array `(B, T, HEADS, WIDTH)`."""
    column = tl.arange(0, SIZE)
    row = (batch.to(tl.int64) * T + token) * HEADS + head
    inside = (token < T)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)


@triton.jit
def store(x, value, batch, token, head, T, HEADS, WIDTH, SIZE: tl.constexpr):
    """Stores tokens `(C, SIZE)` of a head in an array `(B, T, HEADS, WIDTH)`."""
    column = tl.arange(0, SIZE)
    row = (batch.to(tl.int64) * T + token) * HEADS + head
    inside = (token < T)[:, None] & (column < WIDTH)[None, :]
    tl.store(x + row[:, None] * WIDTH + column[None, :], value, mask=inside)


@triton.jit
def load_numbers(x, batch, token, head, T, HEADS, other):
    """Loads one number per token of a head from an array `(B, T, HEADS)`."""
    row = (batch.to(tl.int64) * T + token) * HEADS + head
    return tl.load(x + row, mask=token < T, other=other)


@triton.jit
def store_numbers(x, value, batch, token, head, T, HEADS):
    """Stores one number per token of a head in an array `(B, T, HEADS)`."""
    row = (batch.to(tl.int64) * T + token) * HEADS + head
    tl.store(x + row, value, mask=token < T)


@triton.jit
def load_map(vectors, bias, index, tile, H, M, HP: tl.constexpr, MP: tl.constexpr):
    """Loads vectors `(HP, MP)` and the bias `(MP,)` of a tile of a head's features.

    Features that only fill the tile have the bias `LOWEST`.
    """
    row, column = tl.arange(0, HP), tile * MP + tl.arange(0, MP)
    inside = (row < H)[:, None] & (column < M)[None, :]
    at = index * H * M + row[:, None] * M + column[None, :]
    vectors = tl.load(vectors + at, mask=inside, other=0.0)
    return vectors, tl.load(bias + index * M + column, mask=column < M, other=LOWEST)


@triton.jit
def load_sums(maximum, numerator, normalizer, at, M: tl.constexpr, V: tl.constexpr):
    """Loads the sums `(M,)`, `(M, V)` and `(M,)` of part `at`."""
    row, column = tl.arange(0, M), tl.arange(0, V)
    at = at.to(tl.int64)
    whole = at * M * V + row[:, None] * V + column[None, :]
    return (
        tl.load(maximum + at * M + row),
        tl.load(numerator + whole),
        tl.load(normalizer + at * M + row),
    )


@triton.jit
def store_sums(
    maximum, numerator, normalizer, sums, at, M: tl.constexpr, V: tl.constexpr
):
    """Stores the sums of part `at`."""
    row, column = tl.arange(0, M), tl.arange(0, V)
    at = at.to(tl.int64)
    whole = at * M * V + row[:, None] * V + column[None, :]
    tl.store(maximum + at * M + row, sums[0])
    tl.store(numerator + whole, sums[1])
    tl.store(normalizer + at * M + row, sums[2])


@triton.jit
def store_map(
    of_vectors, of_bias, vectors, bias, at, tile, H, M,
    HP: tl.constexpr, MP: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of vectors `(HP, MP)` and bias `(MP,)` at index `at`."""
    row, column = tl.arange(0, HP), tile * MP + tl.arange(0, MP)
    inside = (row < H)[:, None] & (column < M)[None, :]
    at = at.to(tl.int64)
    offset = at * H * M + row[:, None] * M + column[None, :]
    tl.store(of_vectors + offset, vectors, mask=inside)
    tl.store(of_bias + at * M + column, bias, mask=column < M)


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


@triton.jit
def query_gradients(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    gradient, delta, logs, maximum, numerator, normalizer,
    of_query, of_vectors, of_bias,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of queries, and each part's gradients of their map."""
    lane, part = tl.program_id(0), tl.program_id(1)
    pair, tile = lane // TILES, lane % TILES
    batch, head = pair // K, pair % K
    index = head if SHARED else pair
    queries_map, query_base = load_map(
        query_vectors, query_bias, index, tile, H, M, HP, MP
    )
    keys_map, key_base = load_map(key_vectors, key_bias, index, tile, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part
    top, total, count = load_sums(
        maximum, numerator, normalizer, at if CAUSAL else lane, MP, VP
    )
    map_slope = tl.zeros((HP, MP), tl.float32)
    bias_slope = tl.zeros((MP,), tl.float32)
    place = tl.arange(0, C)
    numbers = tile.to(tl.int64) * (tl.num_programs(0) // (K * TILES)) * T * K * G
    of_query += numbers * H
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + place
        reference = top
        if CAUSAL:
            terms = load_numbers(term, batch, token, head, S, K, LOWEST)
            keys = load(key, batch, token, head, S, K, H, HP)
            values = load(value, batch, token, head, S, K, W, VP)
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
            x = load(query, batch, token, n, T, K * G, H, HP)
            queries = exponents(x, queries_map, query_base)
            log = load_numbers(logs, batch, token, n, T, K * G, UNSEEN)
            deltas = load_numbers(delta, batch, token, n, T, K * G, 0.0)
            slopes = load(gradient, batch, token, n, T, K * G, W, VP)
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
    store_map(of_vectors, of_bias, map_slope, bias_slope, at, tile, H, M, HP, MP)


@triton.jit
def key_gradients(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    gradient, delta, logs, references, maximum, numerator, normalizer,
    of_key, of_value, of_term, of_vectors, of_bias,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes gradients of keys, values and terms, and each part's of the key map.

    Blocks run from last to first, and the sums are those over later queries.
    """
    lane, part = tl.program_id(0), tl.program_id(1)
    pair, tile = lane // TILES, lane % TILES
    batch, head = pair // K, pair % K
    index = head if SHARED else pair
    queries_map, query_base = load_map(
        query_vectors, query_bias, index, tile, H, M, HP, MP
    )
    keys_map, key_base = load_map(key_vectors, key_bias, index, tile, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part
    top, total, count = load_sums(
        maximum, numerator, normalizer, at if CAUSAL else lane, MP, VP
    )
    map_slope = tl.zeros((HP, MP), tl.float32)
    bias_slope = tl.zeros((MP,), tl.float32)
    place = tl.arange(0, C)
    numbers = tile.to(tl.int64) * (tl.num_programs(0) // (K * TILES)) * S * K
    of_key += numbers * H
    of_value += numbers * W
    of_term += numbers
    blocks = blocks_of(part, S, BLOCKS, C)
    for step in range(blocks):
        block = part * BLOCKS + blocks - 1 - step
        token = block * C + place
        terms = load_numbers(term, batch, token, head, S, K, LOWEST)
        x = load(key, batch, token, head, S, K, H, HP)
        values = load(value, batch, token, head, S, K, W, VP)
        keys = exponents(x, keys_map, key_base) + terms[:, None]
        visible = terms > LOWEST / 2
        found = tl.where(visible[:, None], tl.exp(keys + top[None, :]), 0.0)
        far = total.to(values.dtype)
        value_slope = dot(found.to(values.dtype), far)
        slope = found * (dot(values, tl.trans(far)) - count[None, :])
        if CAUSAL:
            at_block = lane * tl.num_programs(1) * BLOCKS + block
            reference = tl.load(references + at_block * MP + tl.arange(0, MP))
            excess, exceeds = excess_of(keys, reference, visible, C)
            beside = tl.exp(tl.minimum(excess, SPAN))
            causally = (place[:, None] >= place[None, :]) & visible[None, :]
            for g in range(G):
                n = head * G + g
                queries = load(query, batch, token, n, T, K * G, H, HP)
                queries = exponents(queries, queries_map, query_base)
                log = load_numbers(logs, batch, token, n, T, K * G, UNSEEN)
                deltas = load_numbers(delta, batch, token, n, T, K * G, 0.0)
                slopes = load(gradient, batch, token, n, T, K * G, W, VP)
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
            for g in range(G):
                n = head * G + g
                queries = load(query, batch, token, n, T, K * G, H, HP)
                queries = exponents(queries, queries_map, query_base)
                log = load_numbers(logs, batch, token, n, T, K * G, UNSEEN)
                deltas = load_numbers(delta, batch, token, n, T, K * G, 0.0)
                slopes = load(gradient, batch, token, n, T, K * G, W, VP)
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
    store_map(of_vectors, of_bias, map_slope, bias_slope, at, tile, H, M, HP, MP)
