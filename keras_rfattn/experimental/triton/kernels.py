"""The Triton kernels of linear attention by exponential features.

A sequence is cut into parts of `BLOCKS` blocks of C tokens. `sum_keys` and
`sum_queries` sum each part, `scan` adds up the parts before (or after) each part, and
the other kernels walk through a part block by block, starting from these sums. All
parts run in parallel, so a sequence keeps the whole device busy, and only one state per
part is written to memory.

Arrays of tokens keep the layout of the model, `(B, T, heads, ·)`. Axis 0 of the grid is
a key/value head of a row of the batch, axis 1 is a part.
"""

import triton
import triton.language as tl

from keras_rfattn.experimental.triton.memory import (
    blocks_of,
    load,
    load_keys,
    load_map,
    load_queries,
    load_sums,
    program,
    store,
    store_numbers,
    store_sums,
)
from keras_rfattn.experimental.triton.parts import (
    LOWEST,
    UNSEEN,
    add,
    divided,
    exponents,
    look_up,
    no_tokens,
    read,
    reference_of,
)


@triton.jit
def sum_keys(
    key, vectors, bias, term, value, maximum, numerator, normalizer,
    T, K, H, M, W, SHARED: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Sums the keys and values of each part."""
    lane, part, batch, head, index = program(K, SHARED)
    weights, base = load_map(vectors, bias, index, H, M, HP, MP)
    top, total, count = no_tokens(MP, VP)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        keys, values, terms = load_keys(
            key, value, term, batch, token, head, T, K, H, W, HP, VP
        )
        keys = exponents(keys, weights, base) + terms[:, None]
        visible = terms > LOWEST / 2
        ones = tl.full((C,), 1.0, tl.float32)
        top, total, count = add(top, total, count, keys, visible, values, ones)
    at = lane * tl.num_programs(1) + part
    store_sums(maximum, numerator, normalizer, (top, total, count), at, MP, VP)


@triton.jit
def sum_queries(
    query, vectors, bias, gradient, delta, logs,
    maximum, numerator, normalizer,
    T, K, H, M, W, G: tl.constexpr, SHARED: tl.constexpr, BLOCKS: tl.constexpr,
    C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Sums the queries of each part and the gradients of their numerators."""
    lane, part, batch, head, index = program(K, SHARED)
    weights, base = load_map(vectors, bias, index, H, M, HP, MP)
    top, total, count = no_tokens(MP, VP)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        for g in range(G):
            n = head * G + g
            queries, slopes, deltas, log = load_queries(
                query, gradient, delta, logs, batch, token, n, T, K * G, H, W, HP, VP
            )
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
    """Adds up the sums of parts: of those before each part, after it, or of all."""
    lane, columns = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, M), columns * SIZE + tl.arange(0, SIZE)
    offset = row[:, None] * V + column[None, :]
    top = tl.full((M,), LOWEST, tl.float32)
    total, weight = tl.zeros((M, SIZE), tl.float32), tl.zeros((M,), tl.float32)
    for step in range(count):
        part = count - 1 - step if MODE == "after" else step
        at = (lane * count + part).to(tl.int64) * M
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
        at = lane.to(tl.int64) * M
        tl.store(to_numerator + at * V + offset, total)
        if columns == 0:
            tl.store(to_maximum + at + row, top)
            tl.store(to_normalizer + at + row, weight)


@triton.jit
def outputs(
    query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
    maximum, numerator, normalizer, output, logs, references,
    T, S, K, H, M, W, G: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, MP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Computes outputs, and what gradients need: logs and references."""
    lane, part, batch, head, index = program(K, SHARED)
    of_query, query_base = load_map(query_vectors, query_bias, index, H, M, HP, MP)
    of_key, key_base = load_map(key_vectors, key_bias, index, H, M, HP, MP)
    at = lane * tl.num_programs(1) + part if CAUSAL else lane
    top, total, count = load_sums(maximum, numerator, normalizer, at, MP, VP)
    for block in range(blocks_of(part, T, BLOCKS, C)):
        token = (part * BLOCKS + block) * C + tl.arange(0, C)
        if CAUSAL:
            keys, values, terms = load_keys(
                key, value, term, batch, token, head, S, K, H, W, HP, VP
            )
            keys = exponents(keys, of_key, key_base) + terms[:, None]
            visible = terms > LOWEST / 2
            reference = reference_of(top, keys, visible, C)
            at_block = at.to(tl.int64) * BLOCKS + block
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
                found, whole, shifts = look_up(
                    queries, top, total, count, value.dtype.element_ty
                )
            found, log = divided(found, whole, shifts)
            found = found.to(output.dtype.element_ty)
            store(output, found, batch, token, n, T, K * G, W, VP)
            store_numbers(logs, log, batch, token, n, T, K * G)
        if CAUSAL:
            ones = tl.full((C,), 1.0, tl.float32)
            top, total, count = add(top, total, count, keys, visible, values, ones)
