"""How the Triton kernels read and write arrays of tokens, maps and sums."""

import triton
import triton.language as tl

from keras_rfattn.experimental.triton.parts import LOWEST, UNSEEN


@triton.jit
def blocks_of(part, length, BLOCKS: tl.constexpr, C: tl.constexpr):
    """Returns the number of blocks of a part; the last part may have fewer."""
    return tl.minimum(BLOCKS, tl.cdiv(length - part * BLOCKS * C, C))


@triton.jit
def program(K, SHARED: tl.constexpr):
    """Returns a program's lane, part, row of the batch, head and index of its map."""
    lane, part = tl.program_id(0), tl.program_id(1)
    batch, head = lane // K, lane % K
    return lane, part, batch, head, head if SHARED else lane


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
def load_keys(
    key, value, term, batch, token, head, S, K, H, W,
    HP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Loads keys `(C, HP)`, values `(C, VP)` and terms `(C,)`."""
    terms = load_numbers(term, batch, token, head, S, K, LOWEST)
    keys = load(key, batch, token, head, S, K, H, HP)
    return keys, load(value, batch, token, head, S, K, W, VP), terms


@triton.jit
def load_queries(
    query, gradient, delta, logs, batch, token, n, T, N, H, W,
    HP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Loads queries `(C, HP)`, gradients `(C, VP)` of outputs, deltas and logs."""
    queries = load(query, batch, token, n, T, N, H, HP)
    slopes = load(gradient, batch, token, n, T, N, W, VP)
    deltas = load_numbers(delta, batch, token, n, T, N, 0.0)
    return queries, slopes, deltas, load_numbers(logs, batch, token, n, T, N, UNSEEN)


@triton.jit
def load_map(vectors, bias, index, H, M, HP: tl.constexpr, MP: tl.constexpr):
    """Loads vectors `(HP, MP)` and the bias `(MP,)` of a head's features."""
    row, column = tl.arange(0, HP), tl.arange(0, MP)
    is_own = column < M
    inside = (row < H)[:, None] & is_own[None, :]
    at = index * H * M + row[:, None] * M + column[None, :]
    vectors = tl.load(vectors + at, mask=inside, other=0.0)
    return vectors, tl.load(bias + index * M + column, mask=is_own, other=LOWEST)


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
    of_vectors, of_bias, vectors, bias, at, H, M, HP: tl.constexpr, MP: tl.constexpr
):
    """Stores the gradients of vectors `(HP, MP)` and bias `(MP,)` at index `at`."""
    row, column = tl.arange(0, HP), tl.arange(0, MP)
    is_own = column < M
    inside = (row < H)[:, None] & is_own[None, :]
    at = at.to(tl.int64)
    offset = at * H * M + row[:, None] * M + column[None, :]
    tl.store(of_vectors + offset, vectors, mask=inside)
    tl.store(of_bias + at * M + column, bias, mask=is_own)
