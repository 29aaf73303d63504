"""The kernel that computes outputs from sums of keys, and from the keys of a block."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keras_rfattn.fused.mosaic.blocks import (
    COLUMN,
    ROW,
    SIZE,
    UNSEEN,
    Parts,
    Sums,
    beside,
    by_column,
    by_row,
    exceeding,
    float32,
    in_turns,
    is_past,
    key_exponents,
    largest,
    matrix,
    numbers,
    pieces,
    precise,
    product,
    query_exponents,
    read,
    reference_at,
    reference_of,
    rounded,
    store,
    store_means,
    summed,
    turned,
)
from keras_rfattn.fused.mosaic.plan import Place
from keras_rfattn.ops.features import LOWEST


def outputs(plan, arguments, sums, numerator):
    """Computes outputs, and what gradients need: logs and references.

    Args:
        plan: The `Plan`.
        arguments: The `Arguments`.
        sums: `Sums` of arrays `(B, K, tiles, parts or 1, 64)`.
        numerator: Array of shape `(B, K, tiles, parts or 1, 64, V)`.

    Returns:
        Tuple of outputs `(tiles, B, T, N, V)`, logs of denominators `(tiles, B, N, T)`,
        `UNSEEN` for a query that sees no key, and the references of blocks,
        `(B, K, tiles, T / 64, 64)`.
    """
    query, value = arguments.query, arguments.value
    batch, length, heads, width = query.shape
    dtype = value.dtype if plan.tiles == 1 else jnp.float32
    value_dim = value.shape[-1]
    maps = Parts(*[matrix(width, query.dtype)] * 2)
    parts = Parts(*[matrix(SIZE, jnp.bfloat16)] * 2)
    # Once the exponents of tokens are known, weights may take the place of tokens.
    is_alike = query.dtype == value.dtype
    return plan.run(
        "outputs",
        _kernel,
        length,
        [
            jax.ShapeDtypeStruct((plan.tiles, batch, length, heads, value_dim), dtype),
            float32(plan.tiles, batch, heads, length),
            float32(plan.batch, plan.heads, plan.tiles, length // SIZE, SIZE),
        ],
        {
            "query_maps": maps,
            "key_maps": maps,
            "tokens": matrix(width, query.dtype),
            "values": matrix(value_dim, value.dtype),
            "means": matrix(value_dim, value.dtype),
            "totals": matrix(value_dim, jnp.float32),
            "found": matrix(value_dim, dtype),
            "rows": parts,
            "columns": parts,
            "far": matrix(SIZE, value.dtype),
            **({} if is_alike else {"near": matrix(SIZE, value.dtype)}),
            "vector": plgpu.SMEM((SIZE,), jnp.float32),
            "log": plgpu.SMEM((SIZE,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "arrived": plgpu.Barrier(num_arrivals=1),
        },
        (*arguments.flat(), sums.maximum, sums.mass, numerator),
    )


def _kernel(plan, blocks, query, key, query_high, query_low, key_high, key_low,
            query_bias, key_bias, term, anchor, value, maximum, mass, numerator,
            output, logs, references, *, query_maps, key_maps, tokens, values, means,
            totals, found, rows, columns, far, vector, log, loaded, arrived,
            near=None):  # fmt: skip
    near = tokens.at[:, pl.ds(0, SIZE)] if near is None else near
    place = Place.current(plan)
    batch, head = place.batch, place.head
    place.load_map((query_high, query_low), query_maps, loaded)
    query_base = place.load_bias(query_bias, COLUMN)
    if plan.is_causal:
        place.load_map((key_high, key_low), key_maps, loaded)
        key_base = place.load_bias(key_bias, ROW)
    at = batch, head, place.tile, place.part if plan.is_causal else 0
    plgpu.copy_gmem_to_smem(numerator.at[at], totals, arrived)
    plgpu.barrier_wait(arrived)
    sums = Sums(numbers(maximum.at[at], ROW), numbers(mass.at[at], ROW))

    def step(i, sums):
        block = place.first + i
        some = pl.ds(block * SIZE, SIZE)
        if plan.is_causal:
            plgpu.copy_gmem_to_smem(key.at[batch, some, head], tokens, loaded)
            plgpu.copy_gmem_to_smem(value.at[batch, some, head], values, loaded)
            plgpu.barrier_wait(loaded)
            terms = numbers(term.at[batch, head, some], COLUMN)
            keys, visible = key_exponents(tokens, key_maps, key_base, terms)
            anchors = numbers(anchor.at[batch, head, some], COLUMN)
            reference = reference_of(sums.maximum, keys, anchors)
            references[batch, head, place.tile, block] = reference
            exceeds = exceeding(keys, visible, reference)
        store_means(means, totals, sums.mass)
        far_log = turned(vector, sums.log_mass)

        def of_head(g, _):
            n = head * plan.groups + g
            plgpu.copy_gmem_to_smem(query.at[batch, some, n], tokens, arrived)
            plgpu.barrier_wait(arrived)
            queries = query_exponents(tokens, query_maps, query_base)
            distant = queries + by_column(far_log)

            def whole():
                shift = largest(distant)
                far[...], features = rounded(
                    jnp.exp(distant - by_row(shift)), far.dtype
                )
                total = summed(features)
                is_seen = shift > LOWEST / 2
                scale = jnp.where(is_seen, 1 / total, 0.0)
                for piece in pieces(found.shape[1]):
                    own = product((far, means.at[:, piece])) * by_row(scale)
                    found[:, piece] = own.astype(found.dtype)
                log[...] = jnp.where(is_seen, shift + jnp.log(total), UNSEEN)

            def turn(i, is_own):
                own = reference_at(i, reference, keys, visible)
                store(columns, beside(keys, visible, own))
                nearby = queries + by_column(turned(vector, own))
                shift = jnp.maximum(largest(nearby), largest(distant))
                store(rows, jnp.exp(nearby - by_row(shift)))
                weights = precise(rows, columns)
                seen = is_past() & (by_column(terms) > LOWEST / 2)
                weights = jnp.where(seen, weights, 0.0)
                # Weights may be large where the excess of a key is. A float16 holds
                # them relative to the largest of the row.
                lift = jnp.maximum(largest(weights), 1.0)
                near[...], weights = rounded(weights / by_row(lift), near.dtype)
                features = jnp.exp(distant - by_row(shift)) / by_row(lift)
                far[...], features = rounded(features, far.dtype)
                total = summed(features) + summed(weights)
                scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)
                for piece in pieces(found.shape[1]):
                    pairs = (far, means.at[:, piece]), (near, values.at[:, piece])
                    new = (product(*pairs) * by_row(scale)).astype(found.dtype)
                    found[:, piece] = jnp.where(
                        by_row(is_own) > 0, new, read(found, piece)
                    )
                new = shift + jnp.log(lift) + jnp.log(jnp.maximum(total, 1e-37))
                new = jnp.where(total > 0, new, UNSEEN)
                log[...] = jnp.where(is_own > 0, new, numbers(log, ROW))

            in_turns(exceeds, turn) if plan.is_causal else whole()
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(found, output.at[place.tile, batch, some, n])
            logs[place.tile, batch, n, some] = numbers(log, ROW)
            plgpu.wait_smem_to_gmem(0)
            return ()

        lax.fori_loop(0, plan.groups, of_head, ())
        if plan.is_causal:
            sums = sums.added(keys, visible, values, None, totals, near)
        return sums

    lax.fori_loop(0, jnp.minimum(plan.blocks, blocks - place.first), step, sums)
