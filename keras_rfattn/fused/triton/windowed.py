"""Attention that is exact nearby and uses features beyond, in Triton."""

from typing import NamedTuple

import torch

from keras_rfattn.fused.triton import windows
from keras_rfattn.fused.triton.plan import Plan, added, joined
from keras_rfattn.ops.features import LOWEST

# Windows of these sizes fit in a block.
SIZES = 16, 32, 64, 128


class Nearby(NamedTuple):
    """What is exact.

    Attributes:
        window: Number of tokens in a window, one of `SIZES`.
        near: Number of windows before a query's own that are exact too (and after it,
            without causality): 0 or 1.
        sinks: Number of first tokens that are exact, at most 16.
        scale: Factor on the product of a query and a key in the exact part.
    """

    window: int
    near: int
    sinks: int
    scale: float


def windowed_attention(tokens, maps, terms, value, causal, nearby, sizes):
    """Computes self-attention that is exact nearby and uses features beyond.

    Args:
        tokens: Queries `(B, T, N, H)` and keys `(B, T, K, H)`, finite.
        maps: Vectors of queries and of keys, `(B or 1, K, H, M)`, and their biases,
            `(B or 1, K, 1, M)`, float32.
        terms: Arrays of shapes `(R, B, T, N)` and `(R, B, T, K)`, float32, added to
            exponents of a query and of a key, as for `launch.linear_attention`.
        value: Array of shape `(B, T, K, V)`, finite; its dtype is that of products.
        causal: Whether query i sees only keys `j <= i`.
        nearby: `Nearby`. Windows and sinks are counted from the first token.
        sizes: `Sizes`; its `tokens` and `blocks` have no effect.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    arrays = [x.contiguous() for x in (*tokens, *maps, *terms, value)]
    sizes = sizes._replace(tokens=nearby.window, blocks=1)
    return _WindowedAttention.apply(*arrays, causal, nearby, sizes)


def _on_both_sides(plan, sums, causal_side):
    """Returns the sums before and after each window; if causal, of one side only."""
    sides = "before", "after"
    if plan.causal:
        return [*plan.scanned(sums, plan.T, causal_side)] * 2
    return [x for side in sides for x in plan.scanned(sums, plan.T, side)]


class _WindowedAttention(torch.autograd.Function):
    """See `windowed_attention`."""

    @staticmethod
    def forward(
        ctx, query, key, query_vectors, key_vectors, query_bias, key_bias, query_term,
        term, value, causal, nearby, sizes,
    ):  # fmt: skip
        plan = Plan(query, value, term, query_vectors, causal, sizes)
        far_term = term
        if nearby.sinks:
            far_term = term.clone()
            far_term[:, :, : nearby.sinks] = LOWEST
        sums = plan.key_sums(key, key_vectors, key_bias, far_term, value)
        sums = _on_both_sides(plan, sums, "before")
        output = plan.by_tile((*query.shape[:3], plan.W), value.dtype)
        logs = plan.by_tile(query.shape[:3])
        plan.run(
            windows.windowed_outputs, plan.T, query, key, query_vectors, query_bias,
            query_term, term, value, *sums, output, logs, nearby.scale,
            *_lengths(plan), CAUSAL=causal, NEAR=nearby.near, SINKS=nearby.sinks,
        )  # fmt: skip
        # These logs include the terms of queries.
        output, logs = joined(output, logs, value.dtype)
        ctx.plan, ctx.nearby = plan, nearby
        ctx.save_for_backward(
            query, key, query_vectors, key_vectors, query_bias, key_bias, query_term,
            term, far_term, value, output, logs, *sums,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, gradient):
        *arrays, query_term, term, far_term, value, output, logs = ctx.saved_tensors[
            :-6
        ]
        query, key, query_vectors, key_vectors, query_bias, key_bias = arrays
        sums, plan, nearby = ctx.saved_tensors[-6:], ctx.plan, ctx.nearby
        gradient = gradient.to(value.dtype).contiguous()
        delta = (gradient.float() * output).sum(-1)
        lengths, constants = (
            _lengths(plan),
            {"CAUSAL": plan.causal, "NEAR": nearby.near},
        )

        of_query = plan.by_tile(query.shape, query.dtype)
        of_query_term = plan.by_tile(logs.shape)
        of_query_map = plan.of_map(plan.T)
        count = plan.batch * plan.K * plan.parts(plan.T) if nearby.sinks else 0
        of_sinks = [
            torch.empty((count, 16, width), device=query.device)
            for width in (plan.HP, plan.VP)
        ]
        plan.run(
            windows.windowed_query_gradients, plan.T, query, key, query_vectors,
            query_bias, query_term, term, value, gradient, delta, logs, *sums, of_query,
            of_query_term, *of_query_map, *of_sinks, nearby.scale, *lengths,
            SINKS=nearby.sinks, **constants,
        )  # fmt: skip
        # Exponents relative to a log include the term of the query.
        later = plan.query_sums(
            query, query_vectors, query_bias, gradient, delta, logs - query_term
        )
        later = _on_both_sides(plan, later, "after")
        of_key, of_value, of_term = (
            plan.by_tile(x.shape, x.dtype) for x in (key, value, term[0])
        )
        of_key_map = plan.of_map(plan.T)
        plan.run(
            windows.windowed_key_gradients, plan.T, query, key, key_vectors, key_bias,
            far_term, term, value, gradient, delta, logs, *later, of_key, of_term,
            of_value, *of_key_map, nearby.scale, *lengths, **constants,
        )  # fmt: skip
        of_query, of_key, of_value = map(added, (of_query, of_key, of_value))
        of_query_term, of_term = map(plan.by_group, (of_query_term, of_term))
        if nearby.sinks:
            for slope, of_sink in zip((of_key, of_value), of_sinks, strict=True):
                of_sink = of_sink.unflatten(0, (plan.batch, plan.K, -1)).sum(2)
                first = slope[:, : nearby.sinks]
                of_sink = of_sink[:, :, : first.shape[1], : first.shape[3]]
                first += of_sink.transpose(1, 2)
        return (
            of_query, of_key, plan.summed(of_query_map[0], query_vectors),
            plan.summed(of_key_map[0], key_vectors),
            plan.summed(of_query_map[1], query_bias),
            plan.summed(of_key_map[1], key_bias), of_query_term, of_term, of_value,
            None, None, None,
        )  # fmt: skip


def _lengths(plan):
    return plan.T, plan.K, plan.H, plan.M, plan.W
