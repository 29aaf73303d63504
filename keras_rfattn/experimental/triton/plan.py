"""How the Triton kernels divide the work of one call, and the memory they need."""

from typing import Any, NamedTuple

import torch
import triton

from keras_rfattn.experimental.triton import kernels


class Sizes(NamedTuple):
    """How kernels divide a sequence.

    Attributes:
        tokens: Number C of tokens in a block.
        blocks: Number of blocks in a part.
        columns: Number of columns of the numerators that a program of `scan` adds.
        warps: Number of warps of a program.
    """

    tokens: int = 64
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


class Plan:
    """The sizes of one call, which runs its kernels. Names are those of `kernels`."""

    def __init__(self, query, value, query_vectors, causal, sizes):
        self.batch, self.T, heads, self.H = query.shape
        self.S, self.K, self.W = value.shape[1:]
        self.G, self.M = heads // self.K, query_vectors.shape[-1]
        self.shared = query_vectors.shape[0] == 1
        self.causal, self.sizes = causal, sizes
        self.HP, self.MP, self.VP = (
            max(16, triton.next_power_of_2(x)) for x in (self.H, self.M, self.W)
        )
        self.lanes = self.batch * self.K
        self.device = query.device

    def parts(self, length):
        """Returns the number of parts of a sequence."""
        return triton.cdiv(length, self.sizes.tokens * self.sizes.blocks)

    def run(self, kernel, length, *args, **constants):
        """Runs a kernel for all parts of a sequence."""
        grid = self.lanes, self.parts(length)
        known = {"G": self.G, "BLOCKS": self.sizes.blocks}
        constants |= {x: known[x] for x in known if x in kernel.arg_names}
        kernel[grid](
            *args, **constants, SHARED=self.shared, C=self.sizes.tokens, HP=self.HP,
            MP=self.MP, VP=self.VP,
            num_warps=self.sizes.warps,
        )  # fmt: skip

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
        """Returns the sums over keys and values of each part."""
        sums = self.sums(self.S)
        self.run(
            kernels.sum_keys, self.S, key, vectors, bias, term, value, *sums,
            self.S, self.K, self.H, self.M, self.W,
        )  # fmt: skip
        return sums

    def query_sums(self, query, vectors, bias, gradient, delta, logs):
        """Returns the sums over queries of each part."""
        sums = self.sums(self.T)
        self.run(
            kernels.sum_queries, self.T, query, vectors, bias, gradient, delta, logs,
            *sums, self.T, self.K, self.H, self.M, self.W,
        )  # fmt: skip
        return sums

    def of_map(self, length):
        """Returns memory for the gradients of a map, for each part of a sequence."""
        count = self.lanes * self.parts(length)
        shapes = (count, self.H, self.M), (count, self.M)
        return [torch.empty(x, device=self.device) for x in shapes]

    def summed(self, slopes, like):
        """Sums gradients of a map over parts, to the shape of the map's weight."""
        slopes = slopes.reshape(self.batch, self.K, -1, *slopes.shape[1:]).sum(2)
        slopes = slopes.sum(0, keepdim=True) if like.shape[0] == 1 else slopes
        return slopes.reshape(like.shape).to(like.dtype)
