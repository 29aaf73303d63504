"""Operations of the Mosaic GPU kernels on blocks of 64 tokens and tiles of 64 features.

Every matrix in registers is 64 x 64, the shape of one `wgmma` instruction's rows.
Features are `exp(x · vectors + bias + term)`, where `term` is one number per token: for
keys it is `LOWEST` where a key is hidden. Keys are kept with their features along rows,
`(M, C)`, so that a maximum over tokens reduces rows, which warps need no memory for.
Queries are kept `(C, M)`, so that a maximum over their features does, too.

Tensor cores multiply numbers of 16 bits that lie in shared memory. A float32 matrix is
therefore stored as two parts in bfloat16, which together have 16 bits of precision and
the range of float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keras_rfattn.ops.features import LOWEST

# Number of tokens in a block, of features in a tile and of columns in a piece.
SIZE = 64
SQUARE = (SIZE, SIZE)
# The largest excess of a key's exponent over the reference (`reference_of`) that the
# product of a block can hold.
SPAN = 40.0
# The log of the denominator of a query that sees no key.
UNSEEN = -LOWEST
# Stands for the log of 0 where `LOWEST` is an exponent already.
NOTHING = 4 * LOWEST

# How threads divide the numbers of a matrix, and of a vector that has one number per
# row of a matrix, or one per column. The compiler is told at every turn, because it
# finds by trial what it is not told.
WHOLE = plgpu.Layout.WGMMA
ROW, COLUMN = WHOLE.reduce(1), WHOLE.reduce(0)


class Parts(NamedTuple):
    """Two bfloat16 matrices in shared memory whose sum is a float32 matrix."""

    high: Any
    low: Any

    @property
    def T(self):  # noqa: N802
        """The transposed matrix."""
        return Parts(self.high.T, self.low.T)


def by_row(x):
    """Returns a matrix that has number i of a vector in row i."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, SQUARE, (0,)), WHOLE)


def by_column(x):
    """Returns a matrix that has number i of a vector in column i."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, SQUARE, (1,)), WHOLE)


def largest(x):
    """Returns the maximum of each row of a matrix."""
    return plgpu.layout_cast(jnp.max(x, axis=1), ROW)


def summed(x):
    """Returns the sum of each row of a matrix."""
    return plgpu.layout_cast(jnp.sum(x, axis=1), ROW)


def read(ref, piece=None):
    """Loads a matrix, or 64 columns of it."""
    return plgpu.layout_cast(ref[...] if piece is None else ref[:, piece], WHOLE)


def numbers(ref, layout):
    """Loads a vector."""
    return plgpu.load(ref, layout=layout, optimized=False)


def turned(memory, x):
    """Returns a vector of one number per row as one number per column.

    It goes through memory, because a vector keeps its layout. For the same reason, one
    array must not be loaded in two layouts: the compiler would join the two loads.
    """
    memory[...] = x
    return numbers(memory, COLUMN)


def full(value):
    """Returns a vector, one number per row."""
    return plgpu.layout_cast(jnp.full((SIZE,), value, jnp.float32), ROW)


def pieces(width):
    """Returns slices of 64 columns."""
    return [pl.ds(i, SIZE) for i in range(0, width, SIZE)]


def rounded(x, dtype):
    """Returns an array in a narrower dtype, and what it is in float32.

    Without the barrier, a compiler may leave the rounding out of the latter.
    """
    x = lax.optimization_barrier(x.astype(dtype))
    return x, x.astype(jnp.float32)


def store(parts, x):
    """Stores a float32 matrix as two `Parts`."""
    high, wide = rounded(x, jnp.bfloat16)
    parts.high[...] = high
    parts.low[...] = (x - wide).astype(jnp.bfloat16)


def product(*pairs):
    """Returns the sum of products of matrices in shared memory, in float32."""
    plgpu.commit_smem()

    def add(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        return plgpu.layout_cast(total[...], WHOLE)

    return pl.run_scoped(add, plgpu.ACC(SQUARE, jnp.float32))


def precise(a, b):
    """Returns the product of two matrices that are stored as `Parts`."""
    return product((a.high, b.high), (a.high, b.low), (a.low, b.high))


def key_exponents(x, vectors, bias, term):
    """Returns exponents `(M, C)` of tokens, and whether each is visible, `(M, C)`.

    Args:
        x: Reference to tokens `(C, H)`.
        vectors: `Parts` of vectors `(M, H)`, in the dtype of the tokens.
        bias: Vector of shape `(M,)`, a number per row.
        term: Vector of shape `(C,)`, a number per column; `LOWEST` for hidden tokens.
    """
    found = product((vectors.high, x.T), (vectors.low, x.T))
    term = by_column(term)
    return found + by_row(bias) + term, term > LOWEST / 2


def query_exponents(x, vectors, bias):
    """Returns exponents `(C, M)` of tokens, as `key_exponents`, without a term."""
    return product((x, vectors.high.T), (x, vectors.low.T)) + by_column(bias)


def reference_of(maximum, keys, anchor):
    """Returns the maximum `(M,)` that all queries of the block may use.

    It is the maximum before the block. It includes the key whose `anchor` is 0, which
    is the first visible one of the block if that is the first token, or if no key comes
    before.
    """
    first = jnp.where(by_column(anchor) > LOWEST / 2, keys, LOWEST)
    return jnp.maximum(maximum, largest(first))


def exceeding(keys, visible, reference):
    """Returns 1 for queries that see a key whose excess the product cannot hold."""
    excess = jnp.where(visible, keys - by_row(reference), LOWEST)
    most = plgpu.layout_cast(jnp.max(excess, axis=0), COLUMN)
    seen = jnp.where(is_past(), by_column(most), LOWEST)
    return jnp.where(largest(seen) > SPAN, 1.0, 0.0)


def is_past():
    """Returns whether column j is a token up to that of row i."""
    row = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=WHOLE)
    column = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WHOLE)
    return row >= column


def in_turns(exceeds, step):
    """Calls `step` for the whole block, then for each row whose excess is too large.

    Args:
        exceeds: Vector of shape `(C,)`, a number per row; see `exceeding`.
        step: Function of the number of a turn, which passes it to `reference_at`, and
            of the rows `(C,)` that this turn computes, 1 or 0.
    """
    count = jnp.where(jnp.max(exceeds) > 0, SIZE + 1, 1)
    place = plgpu.broadcasted_iota(jnp.int32, (SIZE,), 0, layout=ROW)

    def turn(i, _):
        all_others = jnp.where(i == 0, 1.0, 0.0) * (1.0 - exceeds)
        is_own = all_others + jnp.where(place == i - 1, exceeds, 0.0)
        pl.when(jnp.max(is_own) > 0)(lambda: step(i, is_own))
        return ()

    lax.fori_loop(0, count, turn, ())


def reference_at(turn, reference, keys, visible):
    """Returns the reference `(M,)` of a turn: of all keys that its row sees.

    The first turn, for the whole block, keeps the reference.
    """
    column = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WHOLE)
    seen = jnp.where((column < turn) & visible, keys, LOWEST)
    return jnp.maximum(reference, largest(seen))


def beside(keys, visible, reference):
    """Returns features `(M, C)` of keys, relative to a reference."""
    excess = jnp.where(visible, keys - by_row(reference), LOWEST)
    return jnp.exp(jnp.minimum(excess, SPAN))


class Sums(NamedTuple):
    """Sums over tokens, relative to a running maximum per feature.

    Attributes:
        maximum: Vector `(M,)`, a number per row.
        mass: Vector `(M,)`: the sum of the features.
        weighted: Vector `(M,)`: the sum of features times a weight per token, or `None`
            if there are no weights.
    """

    maximum: Any
    mass: Any
    weighted: Any = None

    @property
    def log_mass(self):
        """The log of the whole sum of a feature; `NOTHING` if there is no token."""
        log = jnp.log(jnp.maximum(self.mass, 1e-37))
        return jnp.where(self.mass > 0, self.maximum + log, NOTHING)

    def added(self, exponent, visible, value, weight, numerator, memory):
        """Returns the sums after the tokens of a block.

        Args:
            exponent: Matrix `(M, C)`.
            visible: Booleans `(M, C)`, true for tokens to add.
            value: Reference to an array `(C, V)` that the numerator sums.
            weight: Vector `(C,)`, a number per column, or `None`.
            numerator: Reference to the float32 sums `(M, V)`, which are changed.
            memory: Reference to memory `(M, C)` in the dtype of the values.
        """
        exponent = jnp.where(visible, exponent, LOWEST)
        new = jnp.maximum(self.maximum, largest(exponent))
        scale = jnp.exp(self.maximum - new)
        found = jnp.where(visible, jnp.exp(exponent - by_row(new)), 0.0)
        memory[...], found = rounded(found, value.dtype)
        for piece in pieces(value.shape[1]):
            own = product((memory, value.at[:, piece]))
            numerator[:, piece] = read(numerator, piece) * by_row(scale) + own
        weighted = self.weighted
        if weighted is not None:
            weighted = weighted * scale + summed(found * by_column(weight))
        return Sums(new, self.mass * scale + summed(found), weighted)


def store_means(means, numerator, mass):
    """Stores the mean `(M, V)` of the values that each feature sums.

    The mean has the magnitude of one value, so that float16 holds it for any length.
    """
    share = 1 / jnp.where(mass > 0, mass, 1.0)
    for piece in pieces(means.shape[1]):
        found = read(numerator, piece) * by_row(share)
        means[:, piece] = found.astype(means.dtype)


def clear(ref):
    """Sets a float32 matrix in shared memory to 0."""
    for piece in pieces(ref.shape[1]):
        ref[:, piece] = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WHOLE)


def matrix(width, dtype):
    """Returns the type of a matrix `(64, width)` in shared memory.

    Its tiles and their order are those that tensor cores read.
    """
    row = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((SIZE, width), dtype, transforms=transforms)


def float32(*shape):
    """Returns the shape of a float32 output."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
