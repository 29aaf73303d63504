"""Converts the features of a model to the arguments of the Triton kernels."""

import torch
import triton

from keras_rfattn.backend import representable
from keras_rfattn.experimental.triton.launch import linear_attention
from keras_rfattn.experimental.triton.plan import Sizes
from keras_rfattn.ops.deferred import Scaled
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import heads_first, merge_heads

# How the kernels divide the work, by causality, unless options ask for a block size.
# With 64 tokens or 4 warps the causal kernels need more registers than an H100 has.
SIZES = {True: Sizes(tokens=32, warps=8), False: Sizes(tokens=64, warps=8)}


def attention(deferred, value, key_mask, is_causal, options):
    """Computes linear attention by exponential features."""
    if value.dtype == torch.float64:
        raise ValueError(
            "The Triton kernels add in float32. Received: values of dtype float64. Use "
            "a narrower dtype, or implementation='xla'."
        )
    dtype, value = value.dtype, representable(value)
    num_kv_heads = value.shape[2]
    of_query, of_key = (_affine(x, num_kv_heads) for x in deferred)
    maps = of_query[0], of_key[0], of_query[1], of_key[1]
    term = _common(deferred[1], num_kv_heads)
    if key_mask is not None:
        term = torch.where(key_mask[..., None], term, LOWEST)
    tokens, sizes = [x.x for x in deferred], SIZES[is_causal]
    if options.block_size is not None:
        size = triton.next_power_of_2(options.block_size)
        sizes = sizes._replace(tokens=min(max(size, 16), 128))
    return linear_attention(tokens, maps, term, value, is_causal, sizes).to(dtype)


def _common(features, num_kv_heads):
    """Returns the exponents that the features of a token share, `(B, T, N)`."""
    _, length, num_heads, _ = features.x.shape
    common = heads_first(features, num_kv_heads).common
    return merge_heads(common, num_heads, length)[..., 0]


def _factor(features):
    """Returns the number by which the features scale their tokens."""
    function = features.function
    return function.factor if isinstance(function, Scaled) else 1.0


def _affine(features, num_kv_heads):
    """Returns vectors and bias of exponents `x · vectors + bias` of unscaled tokens."""
    zero = features.x.new_zeros((1, num_kv_heads, 1, features.x.shape[-1]))
    at_zero = features.function.exponents(zero, features.parameters)
    bias = at_zero.bias + at_zero.x @ at_zero.vectors
    return _factor(features) * at_zero.vectors, bias
