"""The kernels of the gradients of exponents and of values.

They return the gradients of exponents, which ordinary products turn into those of
tokens and of maps.
"""

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
    beside,
    by_column,
    by_row,
    exceeding,
    float32,
    in_turns,
    is_past,
    key_exponents,
    matrix,
    numbers,
    pieces,
    precise,
    product,
    query_exponents,
    read,
    reference_at,
    reference_of,
    store,
    store_means,
    turned,
)
from keras_rfattn.fused.mosaic.plan import Place
from keras_rfattn.ops.features import LOWEST


def query_slopes(plan, arguments, sums, numerator, gradient, delta, logs):
    """Computes the gradients of the exponents of queries.

    Args:
        plan: The `Plan`.
        arguments: The `Arguments`.
        sums: `Sums` over keys of arrays `(B, K, tiles, parts or 1, 64)`.
        numerator: Array of shape `(B, K, tiles, parts or 1, 64, V)`.
        gradient: Array of shape `(B, T, N, V)`, in the dtype of the values.
        delta: Products of gradients and outputs, `(B, N, T)`.
        logs: Logs of denominators, `(B, N, T)`.

    Returns:
        Array of shape `(B, N, T, M)`, float32.
    """
    query, value = arguments.query, arguments.value
    batch, length, heads, width = query.shape
    maps = Parts(*[matrix(width, query.dtype)] * 2)
    parts = Parts(*[matrix(SIZE, jnp.bfloat16)] * 2)
    values = matrix(value.shape[-1], value.dtype)
    return plan.run(
        "query_slopes",
        _query_kernel,
        length,
        float32(batch, heads, length, plan.tiles * SIZE),
        {
            "query_maps": maps,
            "key_maps": maps,
            "tokens": matrix(width, query.dtype),
            "values": values,
            "gradients": values,
            "means": values,
            "totals": matrix(value.shape[-1], jnp.float32),
            "slopes": matrix(SIZE, jnp.float32),
            "benefits": parts,
            "columns": parts,
            "features": matrix(SIZE, value.dtype),
            "vector": plgpu.SMEM((SIZE,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "arrived": plgpu.Barrier(num_arrivals=1),
        },
        (*arguments.flat(), sums.maximum, sums.mass, numerator, gradient, delta, logs),
    )


def _query_kernel(plan, blocks, query, key, query_high, query_low, key_high, key_low,
                  query_bias, key_bias, term, anchor, value, maximum, mass, numerator,
                  gradient, delta, logs, of_query, *, query_maps, key_maps, tokens,
                  values, gradients, means, totals, slopes, benefits, columns, features,
                  vector, loaded, arrived):  # fmt: skip
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
        some = pl.ds((place.first + i) * SIZE, SIZE)
        if plan.is_causal:
            plgpu.copy_gmem_to_smem(key.at[batch, some, head], tokens, loaded)
            plgpu.copy_gmem_to_smem(value.at[batch, some, head], values, loaded)
            plgpu.barrier_wait(loaded)
            terms = numbers(term.at[batch, head, some], COLUMN)
            keys, visible = key_exponents(tokens, key_maps, key_base, terms)
            anchors = numbers(anchor.at[batch, head, some], COLUMN)
            reference = reference_of(sums.maximum, keys, anchors)
            exceeds = exceeding(keys, visible, reference)
        store_means(means, totals, sums.mass)
        far_log = turned(vector, sums.log_mass)

        def of_head(g, _):
            n = head * plan.groups + g
            plgpu.copy_gmem_to_smem(query.at[batch, some, n], tokens, loaded)
            plgpu.copy_gmem_to_smem(gradient.at[batch, some, n], gradients, loaded)
            plgpu.barrier_wait(loaded)
            deltas = by_row(numbers(delta.at[batch, n, some], ROW))
            queries = query_exponents(tokens, query_maps, query_base)
            queries = queries - by_row(numbers(logs.at[batch, n, some], ROW))
            far = product((gradients, means.T)) - deltas
            slopes[...] = jnp.exp(queries + by_column(far_log)) * far
            if plan.is_causal:
                benefit = product((gradients, values.T)) - deltas
                seen = is_past() & (by_column(terms) > LOWEST / 2)
                store(benefits, jnp.where(seen, benefit, 0.0))

                def turn(i, is_own):
                    own = reference_at(i, reference, keys, visible)
                    store(columns, beside(keys, visible, own))
                    near = jnp.exp(queries + by_column(turned(vector, own)))
                    near = near * precise(benefits, columns.T)
                    near = jnp.where(by_row(is_own) > 0, near, 0.0)
                    slopes[...] = read(slopes) + near

                in_turns(exceeds, turn)
            plgpu.commit_smem()
            to = of_query.at[batch, n, some, place.features]
            plgpu.copy_smem_to_gmem(slopes, to)
            plgpu.wait_smem_to_gmem(0)
            return ()

        lax.fori_loop(0, plan.groups, of_head, ())
        if plan.is_causal:
            sums = sums.added(keys, visible, values, None, totals, features)
        return sums

    lax.fori_loop(0, jnp.minimum(plan.blocks, blocks - place.first), step, sums)


def key_slopes(plan, arguments, sums, numerator, gradient, delta, logs, references):
    """Computes the gradients of the exponents of keys, and of values.

    Args:
        plan: The `Plan`.
        arguments: The `Arguments`.
        sums: `Sums` over queries, weighted by `delta`.
        numerator: Array of shape `(B, K, tiles, parts or 1, 64, V)`: sums of gradients.
        gradient: As in `query_slopes`, as are `delta` and `logs`.
        delta: See `query_slopes`.
        logs: See `query_slopes`.
        references: Array of shape `(B, K, tiles, S / 64, 64)`, or `None`.

    Returns:
        Pair of arrays `(B, K, M, S)` and `(tiles, B, S, K, V)`, float32.
    """
    key, value = arguments.key, arguments.value
    batch, length, heads, width = key.shape
    maps = Parts(*[matrix(width, key.dtype)] * 2)
    parts = Parts(*[matrix(SIZE, jnp.bfloat16)] * 2)
    values = matrix(value.shape[-1], value.dtype)
    # Features may take the place of tokens whose exponents are known.
    is_alike = key.dtype == value.dtype
    # Without causality no kernel reads the references.
    references = sums.maximum if references is None else references
    return plan.run(
        "key_slopes",
        _key_kernel,
        length,
        [
            float32(batch, heads, plan.tiles * SIZE, length),
            float32(plan.tiles, *value.shape),
        ],
        {
            "query_maps": maps,
            "key_maps": maps,
            "tokens": matrix(width, key.dtype),
            "values": values,
            # The means of gradients are read before the gradients of a block arrive.
            "gradients": values,
            "totals": matrix(value.shape[-1], jnp.float32),
            "slopes": matrix(SIZE, jnp.float32),
            "of_values": matrix(value.shape[-1], jnp.float32),
            "rows": parts,
            # The features of keys are read before the benefits of a turn are stored.
            "columns": parts,
            **({} if is_alike else {"features": matrix(SIZE, value.dtype)}),
            "vector": plgpu.SMEM((SIZE,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "arrived": plgpu.Barrier(num_arrivals=1),
        },
        (*arguments.flat(), *sums, numerator, gradient, delta, logs, references),
    )


def _key_kernel(plan, blocks, query, key, query_high, query_low, key_high, key_low,
                query_bias, key_bias, term, _, value, maximum, mass, weighted,
                numerator, gradient, delta, logs, references, of_key, of_value, *,
                query_maps, key_maps, tokens, values, gradients, totals, slopes,
                of_values, rows, columns, vector, loaded, arrived,
                features=None):  # fmt: skip
    is_alike = features is None
    features = tokens.at[:, pl.ds(0, SIZE)] if is_alike else features
    place = Place.current(plan)
    batch, head, tile = place.batch, place.head, place.tile
    place.load_map((key_high, key_low), key_maps, loaded)
    key_base = place.load_bias(key_bias, ROW)
    if plan.is_causal:
        place.load_map((query_high, query_low), query_maps, loaded)
        query_rows = place.load_bias(query_bias, ROW)
        query_base = turned(vector, query_rows)
    at = batch, head, tile, place.part if plan.is_causal else 0
    plgpu.copy_gmem_to_smem(numerator.at[at], totals, arrived)
    plgpu.barrier_wait(arrived)
    later = Sums(*(numbers(x.at[at], ROW) for x in (maximum, mass, weighted)))
    count = jnp.minimum(plan.blocks, blocks - place.first)

    def step(i, later):
        # Blocks run from the last to the first; `later` sums over the queries after.
        block = place.first + count - 1 - i
        some = pl.ds(block * SIZE, SIZE)
        plgpu.copy_gmem_to_smem(key.at[batch, some, head], tokens, loaded)
        plgpu.copy_gmem_to_smem(value.at[batch, some, head], values, loaded)
        plgpu.barrier_wait(loaded)
        terms = numbers(term.at[batch, head, some], COLUMN)
        keys, visible = key_exponents(tokens, key_maps, key_base, terms)
        found = jnp.where(visible, jnp.exp(keys + by_row(later.log_mass)), 0.0)
        features[...] = found.astype(features.dtype)
        store_means(gradients, totals, later.mass)
        for piece in pieces(of_values.shape[1]):
            of_values[:, piece] = product((features.T, gradients.at[:, piece]))
        share = 1 / jnp.where(later.mass > 0, later.mass, 1.0)
        slope = product((gradients, values.T)) - by_row(later.weighted * share)
        slopes[...] = found * slope

        def of_head(g, later):
            n = head * plan.groups + g
            plgpu.copy_gmem_to_smem(query.at[batch, some, n], tokens, loaded)
            plgpu.copy_gmem_to_smem(gradient.at[batch, some, n], gradients, loaded)
            plgpu.barrier_wait(loaded)
            deltas = numbers(delta.at[batch, n, some], ROW)
            log = numbers(logs.at[batch, n, some], ROW)
            queries = query_exponents(tokens, query_maps, query_base) - by_row(log)
            benefit = product((gradients, values.T)) - by_row(deltas)
            seen = is_past() & (by_column(terms) > LOWEST / 2)
            benefit = jnp.where(seen, benefit, 0.0)

            def turn(i, is_own):
                own = reference_at(i, reference, keys, visible)
                nearby = beside(keys, visible, own)
                store(columns, nearby)
                found = jnp.exp(queries + by_column(turned(vector, own)))
                store(rows, jnp.where(by_row(is_own) > 0, found, 0.0))
                weights = jnp.where(seen, precise(rows, columns), 0.0)
                features[...] = weights.astype(features.dtype)
                for piece in pieces(of_values.shape[1]):
                    new = product((features.T, gradients.at[:, piece]))
                    of_values[:, piece] = read(of_values, piece) + new
                store(columns, benefit)
                slopes[...] = read(slopes) + nearby * precise(rows.T, columns)

            in_turns(exceeds, turn)
            # Keys of earlier blocks are seen by these queries.
            if is_alike:
                plgpu.copy_gmem_to_smem(query.at[batch, some, n], tokens, arrived)
                plgpu.barrier_wait(arrived)
            exponent, sees = key_exponents(
                tokens, query_maps, query_rows, turned(vector, -log)
            )
            weight = turned(vector, deltas)
            return later.added(exponent, sees, gradients, weight, totals, features)

        if plan.is_causal:
            reference = numbers(references.at[batch, head, tile, block], ROW)
            exceeds = exceeding(keys, visible, reference)
            later = lax.fori_loop(0, plan.groups, of_head, later)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slopes, of_key.at[batch, head, place.features, some])
        plgpu.copy_smem_to_gmem(of_values, of_value.at[tile, batch, some, head])
        plgpu.wait_smem_to_gmem(0)
        return later

    lax.fori_loop(0, count, step, later)
