"""The kernel that sums the features of each part of a sequence, and their scan."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keras_rfattn.fused.mosaic.blocks import (
    COLUMN,
    ROW,
    SIZE,
    Parts,
    Sums,
    clear,
    float32,
    full,
    key_exponents,
    matrix,
    numbers,
)
from keras_rfattn.fused.mosaic.plan import Place
from keras_rfattn.ops.features import LOWEST


def sum_tokens(plan, groups, x, vectors, bias, term, value, weight=None):
    """Sums the features of each part, and their products with values.

    Args:
        plan: The `Plan`.
        groups: Number of heads of x for each key/value head, which are added.
        x: Array of shape `(B, T, K · groups, H)`.
        vectors: Two parts of vectors, `(B or 1, K, M, H)`, in the dtype of x.
        bias: Array of shape `(B or 1, K, M)`, float32.
        term: Array of shape `(B, K · groups, T)`, float32; `LOWEST` if hidden.
        value: Array of shape `(B, T, K · groups, V)`.
        weight: Optional array of shape `(B, K · groups, T)`.

    Returns:
        Pair of `Sums` of arrays `(B, K, tiles, parts, 64)`, and numerators
        `(B, K, tiles, parts, 64, V)`.
    """
    parts, width = plan.parts(x.shape[1]), value.shape[-1]
    shape = plan.batch, plan.heads, plan.tiles, parts, SIZE
    vectors_of_sums = 2 if weight is None else 3
    weights = [] if weight is None else [weight]
    *found, numerator = plan.run(
        "sum_tokens",
        functools.partial(_sum_kernel, groups),
        x.shape[1],
        [*[float32(*shape)] * vectors_of_sums, float32(*shape, width)],
        {
            "maps": Parts(*[matrix(x.shape[-1], x.dtype)] * 2),
            "tokens": matrix(x.shape[-1], x.dtype),
            "values": matrix(width, value.dtype),
            "features": matrix(SIZE, value.dtype),
            "numerator": matrix(width, jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
        (x, *vectors, bias, term, value, *weights),
    )
    return Sums(*found), numerator


def _sum_kernel(groups, plan, blocks, x, high, low, bias, term, value, *refs, maps,
                tokens, values, features, numerator, loaded):  # fmt: skip
    place = Place.current(plan)
    *weights, to_maximum, to_mass = refs[: 3 if len(refs) == 5 else 2]
    *to_weighted, to_numerator = refs[len(weights) + 2 :]
    place.load_map((high, low), maps, loaded)
    base = place.load_bias(bias, ROW)
    clear(numerator)

    def step(i, sums):
        token, head = (place.first + i // groups) * SIZE, place.head * groups
        head = head + lax.rem(i, groups)
        some = pl.ds(token, SIZE)
        plgpu.copy_gmem_to_smem(x.at[place.batch, some, head], tokens, loaded)
        plgpu.copy_gmem_to_smem(value.at[place.batch, some, head], values, loaded)
        plgpu.barrier_wait(loaded)
        terms = numbers(term.at[place.batch, head, some], COLUMN)
        weight = None
        if weights:
            weight = numbers(weights[0].at[place.batch, head, some], COLUMN)
        exponent, visible = key_exponents(tokens, maps, base, terms)
        return sums.added(exponent, visible, values, weight, numerator, features)

    sums = Sums(full(LOWEST), full(0.0), full(0.0) if weights else None)
    count = jnp.minimum(plan.blocks, blocks - place.first) * groups
    sums = lax.fori_loop(0, count, step, sums)
    at = place.batch, place.head, place.tile, place.part
    to_maximum[at] = sums.maximum
    to_mass[at] = sums.mass
    if weights:
        to_weighted[0][at] = sums.weighted
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(numerator, to_numerator.at[at])
    plgpu.wait_smem_to_gmem(0)


def merged(one, other):
    """Returns the sums over the tokens of two pairs of `Sums` and numerators."""
    (sums, numerator), (others, other_numerator) = one, other
    maximum = jnp.maximum(sums.maximum, others.maximum)
    scale, other_scale = (
        jnp.exp(sums.maximum - maximum),
        jnp.exp(others.maximum - maximum),
    )

    def add(x, y):
        return None if x is None else x * scale + y * other_scale

    numerator = numerator * scale[..., None] + other_numerator * other_scale[..., None]
    mass, weighted = add(sums.mass, others.mass), add(sums.weighted, others.weighted)
    return Sums(maximum, mass, weighted), numerator


def scanned(pair, which):
    """Adds up the sums of parts: of those before each part, after it, or of all.

    Args:
        pair: The result of `sum_tokens`.
        which: `"before"`, `"after"` or `"all"`, which gives one part.
    """
    axis = 3
    is_after = which == "after"
    found = lax.associative_scan(merged, pair, reverse=is_after, axis=axis)
    if which == "all":
        return jax.tree.map(lambda x: x[:, :, :, -1:], found)

    def moved(x, nothing):
        first = jnp.full_like(x[:, :, :, :1], nothing)
        joint = [x[:, :, :, 1:], first] if is_after else [first, x[:, :, :, :-1]]
        return jnp.concatenate(joint, axis=axis)

    sums, numerator = found
    weighted = None if sums.weighted is None else moved(sums.weighted, 0)
    sums = Sums(moved(sums.maximum, LOWEST), moved(sums.mass, 0), weighted)
    return sums, moved(numerator, 0)
