"""Linear attention by exponential features in Triton, with gradients."""

import torch

from keras_rfattn.experimental.triton import gradients, kernels
from keras_rfattn.experimental.triton.plan import Plan, Sums


def linear_attention(tokens, maps, term, value, causal, sizes):
    """Computes linear attention by exponential features."""
    arrays = [x.contiguous() for x in (*tokens, *maps, term, value)]
    return _LinearAttention.apply(*arrays, causal, sizes)


class _LinearAttention(torch.autograd.Function):
    """See `linear_attention`."""

    @staticmethod
    def forward(
        ctx, query, key, query_vectors, key_vectors, query_bias, key_bias,
        term, value, causal, sizes,
    ):  # fmt: skip
        arrays = query, key, query_vectors, key_vectors, query_bias, key_bias, term
        plan = Plan(query, value, query_vectors, causal, sizes)
        sums = plan.key_sums(key, key_vectors, key_bias, term, value)
        sums = plan.scanned(sums, plan.S, "before" if causal else "all")
        output = value.new_empty((*query.shape[:3], plan.W))
        logs = torch.empty(query.shape[:3], device=query.device)
        count = plan.lanes * plan.parts(plan.T) * sizes.blocks if causal else 0
        references = torch.empty((count, plan.MP), device=query.device)
        plan.run(
            kernels.outputs, plan.T, *arrays, value, *sums, output, logs, references,
            *_lengths(plan), CAUSAL=causal,
        )  # fmt: skip
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

        of_query = torch.empty_like(query)
        of_query_map = plan.of_map(plan.T)
        plan.run(
            gradients.query_gradients, plan.T, *arrays, value, *known, *sums, of_query,
            *of_query_map, *lengths, CAUSAL=causal,
        )  # fmt: skip
        later = plan.query_sums(query, query_vectors, query_bias, *known)
        later = plan.scanned(later, plan.T, "after" if causal else "all")
        of_key, of_value, of_term = map(torch.empty_like, (key, value, term))
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
            of_query, of_key, *of_vectors, *of_bias, of_term, of_value, None, None,
        )  # fmt: skip


def _lengths(plan):
    return plan.T, plan.S, plan.K, plan.H, plan.M, plan.W
