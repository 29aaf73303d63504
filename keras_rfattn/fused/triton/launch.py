"""Linear attention by exponential features in Triton, with gradients."""

import torch

from keras_rfattn.fused.triton import gradients, kernels
from keras_rfattn.fused.triton.plan import Plan, Sums, added, joined


def linear_attention(tokens, maps, terms, value, causal, sizes):
    """Computes linear attention by exponential features.

    Args:
        tokens: Queries `(B, T, N, H)` and keys `(B, S, K, H)`, finite.
        maps: Vectors of queries and of keys, `(B or 1, K, H, M)`, and their biases,
            `(B or 1, K, 1, M)`, float32.
        terms: Arrays of shapes `(R, B, T, N)` and `(R, B, S, K)`, float32, added to
            exponents of a query and of a key: those of group r of R equal groups of
            features. Those of a key are `LOWEST` if it is hidden. The first one may be
            `None` if R is 1, because it cancels.
        value: Array of shape `(B, S, K, V)`, finite; its dtype is that of products.
        causal: Whether query i sees only keys `j <= i`.
        sizes: `Sizes`, how the kernels divide the work.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    query_term, term = terms
    arrays = [x.contiguous() for x in (*tokens, *maps, term, value)]
    query_term = None if len(term) == 1 else query_term.contiguous()
    return _LinearAttention.apply(query_term, *arrays, causal, sizes)


class _LinearAttention(torch.autograd.Function):
    """See `linear_attention`."""

    @staticmethod
    def forward(
        ctx, query_term, query, key, query_vectors, key_vectors, query_bias, key_bias,
        term, value, causal, sizes,
    ):  # fmt: skip
        arrays = query, key, query_vectors, key_vectors, query_bias, key_bias, term
        plan = Plan(query, value, term, query_vectors, causal, sizes)
        sums = plan.key_sums(key, key_vectors, key_bias, term, value)
        sums = plan.scanned(sums, plan.S, "before" if causal else "all")
        output = plan.by_tile((*query.shape[:3], plan.W), value.dtype)
        logs = plan.by_tile(query.shape[:3])
        count = plan.lanes * plan.parts(plan.T) * sizes.blocks if causal else 0
        references = torch.empty((count, plan.MP), device=query.device)
        plan.run(
            kernels.outputs, plan.T, *arrays, value, *sums, output, logs, references,
            *_lengths(plan), CAUSAL=causal,
        )  # fmt: skip
        output, logs = joined(output, logs, value.dtype, query_term)
        # Kernels compute exponents of queries without their terms.
        logs = logs[None] if query_term is None else logs - query_term
        ctx.plan = plan
        ctx.save_for_backward(*arrays, value, output, logs, references, *sums)
        return output

    @staticmethod
    def backward(ctx, gradient):
        *arrays, value, output, logs, references = ctx.saved_tensors[:-3]
        sums, plan = Sums(*ctx.saved_tensors[-3:]), ctx.plan
        query, key, query_vectors, key_vectors, query_bias, key_bias, term = arrays
        gradient = gradient.to(value.dtype).contiguous()
        known = gradient, (gradient.float() * output).sum(-1), logs
        lengths, causal = _lengths(plan), plan.causal

        of_query = plan.by_tile(query.shape, query.dtype)
        of_query_term = plan.by_tile(logs.shape[1:] if plan.groups > 1 else (0,))
        of_query_map = plan.of_map(plan.T)
        plan.run(
            gradients.query_gradients, plan.T, *arrays, value, *known, *sums, of_query,
            of_query_term, *of_query_map, *lengths, CAUSAL=causal,
        )  # fmt: skip
        later = plan.query_sums(query, query_vectors, query_bias, *known)
        later = plan.scanned(later, plan.T, "after" if causal else "all")
        of_key, of_value, of_term = (
            plan.by_tile(x.shape, x.dtype) for x in (key, value, term[0])
        )
        of_key_map = plan.of_map(plan.S)
        plan.run(
            gradients.key_gradients, plan.S, *arrays, value, *known, references, *later,
            of_key, of_value, of_term, *of_key_map, *lengths, CAUSAL=causal,
        )  # fmt: skip
        of_vectors = (
            plan.summed(of_query_map[0], query_vectors),
            plan.summed(of_key_map[0], key_vectors),
        )
        of_bias = (
            plan.summed(of_query_map[1], query_bias),
            plan.summed(of_key_map[1], key_bias),
        )
        return (
            plan.by_group(of_query_term) if plan.groups > 1 else None, added(of_query),
            added(of_key), *of_vectors, *of_bias, plan.by_group(of_term),
            added(of_value), None, None,
        )  # fmt: skip


def _lengths(plan):
    return plan.T, plan.S, plan.K, plan.H, plan.M, plan.W
