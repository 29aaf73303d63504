"""Runs the Triton kernels: linear attention by exponential features, with gradients."""

from typing import Any, NamedTuple

import torch
import triton

from keras_rfattn.fused.triton import kernels


class Sizes(NamedTuple):
    """How kernels divide a sequence.

    Attributes:
        tokens: Number C of tokens in a block.
        features: Largest number of features in a tile, a power of two from 16 on.
        blocks: Number of blocks in a part.
        columns: Number of columns of the numerators that a program of `scan` adds.
        warps: Number of warps of a program.
    """

    tokens: int = 64
    features: int = 64
    blocks: int = 8
    columns: int = 16
    warps: int = 4


class Sums(NamedTuple):
    """Sums of parts: `maximum` `(P, M)`, `numerator` `(P, M, V)`, `normalizer`."""

    maximum: Any
    numerator: Any
    normalizer: Any

    @classmethod
    def empty(cls, count, width, value_dim, device):
        """Returns memory for the sums of `count` parts."""
        shapes = (count, width), (count, width, value_dim), (count, width)
        return cls(*(torch.empty(x, device=device) for x in shapes))


class _Plan:
    """The sizes of one call: names as in `kernels`."""

    def __init__(self, query, key, value, query_vectors, causal, sizes):
        self.batch, self.T, heads, self.H = query.shape
        self.S, self.K, self.W = value.shape[1:]
        self.G, self.M = heads // self.K, query_vectors.shape[-1]
        self.shared = query_vectors.shape[0] == 1
        self.causal, self.sizes = causal, sizes
        self.HP, self.MP, self.VP = (
            max(16, triton.next_power_of_2(x)) for x in (self.H, self.M, self.W)
        )
        self.MP = min(self.MP, sizes.features)
        self.tiles = triton.cdiv(self.M, self.MP)
        self.lanes = self.batch * self.K * self.tiles
        self.device = query.device

    def parts(self, length):
        """Returns the number of parts of a sequence."""
        return triton.cdiv(length, self.sizes.tokens * self.sizes.blocks)

    def run(self, kernel, length, *args, **constants):
        """Runs a kernel for all parts of a sequence."""
        grid = self.lanes, self.parts(length)
        kernel[grid](
            *args, **constants, SHARED=self.shared, TILES=self.tiles,
            BLOCKS=self.sizes.blocks, C=self.sizes.tokens, HP=self.HP, MP=self.MP,
            VP=self.VP, num_warps=self.sizes.warps,
        )  # fmt: skip

    def by_tile(self, shape, dtype=torch.float32):
        """Returns memory for an array for each tile; float32 if arrays are added."""
        dtype = dtype if self.tiles == 1 else torch.float32
        return torch.empty((self.tiles, *shape), dtype=dtype, device=self.device)

    def sums(self, length):
        """Returns memory for the sums of all parts of a sequence."""
        return self.sums_of(self.lanes * self.parts(length))

    def sums_of(self, count):
        """Returns memory for `count` sums."""
        return Sums.empty(count, self.MP, self.VP, self.device)

    def scanned(self, sums, length, mode):
        """Returns the sums before each part, after it, or of all; see `scan`."""
        found = self.sums_of(self.lanes) if mode == "all" else self.sums(length)
        columns = min(self.sizes.columns, self.VP)
        kernels.scan[(self.lanes, self.VP // columns)](
            *sums, *found, self.parts(length), MODE=mode, M=self.MP, V=self.VP,
            SIZE=columns, num_warps=self.sizes.warps,
        )  # fmt: skip
        return found

    def key_sums(self, key, vectors, bias, term, value):
        """Returns the sums over keys that the queries of each part start from."""
        sums = self.sums(self.S)
        self.run(
            kernels.sum_keys, self.S, key, vectors, bias, term, value, *sums,
            self.S, self.K, self.H, self.M, self.W,
        )  # fmt: skip
        return self.scanned(sums, self.S, "before" if self.causal else "all")

    def query_sums(self, query, vectors, bias, gradient, delta, logs):
        """Returns the sums over queries that the keys of each part start from."""
        sums = self.sums(self.T)
        self.run(
            kernels.sum_queries, self.T, query, vectors, bias, gradient, delta, logs,
            *sums, self.T, self.K, self.H, self.M, self.W, G=self.G,
        )  # fmt: skip
        return self.scanned(sums, self.T, "after" if self.causal else "all")

    @property
    def lengths(self):
        """The sizes that kernels of queries and keys take."""
        return self.T, self.S, self.K, self.H, self.M, self.W


def _joined(output, logs, dtype):
    """Joins the outputs of tiles `(tiles, B, T, N, V)` by their denominators."""
    if logs.shape[0] == 1:
        return output[0], logs[0]
    shares = torch.softmax(logs, 0)[..., None]
    return (shares * output).sum(0).to(dtype), torch.logsumexp(logs, 0)


class _LinearAttention(torch.autograd.Function):
    """See `linear_attention`."""

    @staticmethod
    def forward(
        ctx, query, key, query_vectors, key_vectors, query_bias, key_bias, term, value,
        causal, sizes,
    ):  # fmt: skip
        arrays = query, key, query_vectors, key_vectors, query_bias, key_bias, term
        plan = _Plan(query, key, value, query_vectors, causal, sizes)
        sums = plan.key_sums(key, key_vectors, key_bias, term, value)
        shape, options = query.shape[:3], {"device": query.device}
        output = plan.by_tile((*shape, plan.W), value.dtype)
        logs = plan.by_tile(shape)
        count = plan.lanes * plan.parts(plan.T) * sizes.blocks if causal else 0
        references = torch.empty((count, plan.MP), **options)
        plan.run(
            kernels.outputs, plan.T, *arrays, value, *sums, output, logs, references,
            *plan.lengths, G=plan.G, CAUSAL=causal,
        )  # fmt: skip
        output, logs = _joined(output, logs, value.dtype)
        ctx.plan = plan
        ctx.save_for_backward(*arrays, value, output, logs, references, *sums)
        return output

    @staticmethod
    def backward(ctx, gradient):
        *arrays, value, output, logs, references = ctx.saved_tensors[:-3]
        sums, plan = Sums(*ctx.saved_tensors[-3:]), ctx.plan
        query, key, query_vectors, key_vectors, query_bias, key_bias, term = arrays
        gradient = gradient.to(value.dtype).contiguous()
        delta = (gradient.float() * output).sum(-1)
        known = gradient, delta, logs
        constants = {"G": plan.G, "CAUSAL": plan.causal}

        def of_map(length):
            count = plan.lanes * plan.parts(length)
            shapes = (count, plan.H, plan.M), (count, plan.M)
            return [torch.zeros(x, device=plan.device) for x in shapes]

        def summed(found, like):
            found = found.reshape(plan.batch, plan.K, -1, *found.shape[1:]).sum(2)
            found = found.sum(0, keepdim=True) if like.shape[0] == 1 else found
            return found.reshape(like.shape).to(like.dtype)

        of_query, map_slopes = plan.by_tile(query.shape, query.dtype), of_map(plan.T)
        plan.run(
            kernels.query_gradients, plan.T, *arrays, value, *known, *sums, of_query,
            *map_slopes, *plan.lengths, **constants,
        )  # fmt: skip
        of_query_map = map(summed, map_slopes, (query_vectors, query_bias))
        later = plan.query_sums(query, query_vectors, query_bias, *known)
        of_key, of_value, of_term = (
            plan.by_tile(x.shape, x.dtype) for x in (key, value, term)
        )
        map_slopes = of_map(plan.S)
        plan.run(
            kernels.key_gradients, plan.S, *arrays, value, *known, references, *later,
            of_key, of_value, of_term, *map_slopes, *plan.lengths, **constants,
        )  # fmt: skip
        of_key_map = map(summed, map_slopes, (key_vectors, key_bias))
        (of_query_vectors, of_query_bias), (of_key_vectors, of_key_bias) = (
            of_query_map, of_key_map,
        )  # fmt: skip
        of_query, of_key, of_value, of_term = (
            x[0] if plan.tiles == 1 else x.sum(0)
            for x in (of_query, of_key, of_value, of_term)
        )
        return (
            of_query, of_key, of_query_vectors, of_key_vectors, of_query_bias,
            of_key_bias, of_term, of_value, None, None,
        )  # fmt: skip


def linear_attention(tokens, maps, term, value, causal, sizes):
    """Computes linear attention by exponential features.

    Args:
        tokens: Queries `(B, T, N, H)` and keys `(B, S, K, H)`, finite.
        maps: Vectors of queries and of keys, `(B or 1, K, H, M)`, and their biases,
            `(B or 1, K, 1, M)`, float32.
        term: Array of shape `(B, S, K)`, float32, added to all exponents of a key;
            `LOWEST` if the key is hidden.
        value: Array of shape `(B, S, K, V)`, finite; its dtype is that of products.
        causal: Whether query i sees only keys `j <= i`.
        sizes: How the kernels divide the work.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    arrays = [x.contiguous() for x in (*tokens, *maps, term, value)]
    return _LinearAttention.apply(*arrays, causal, sizes)
