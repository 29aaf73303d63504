"""Converts the features of a model to the arguments of the Triton kernels."""

import torch
import triton

from keras_rfattn.backend import representable
from keras_rfattn.experimental.triton.launch import linear_attention
from keras_rfattn.experimental.triton.plan import Sizes
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import heads_first, merge_heads

# How the kernels divide the work, by causality, unless options ask for a block size.
# With 64 tokens or 4 warps the causal kernels need more registers than an H100 has.
SIZES = {True: Sizes(tokens=32, warps=8), False: Sizes(tokens=64, warps=8)}


def attention(features, value, key_mask, is_causal, options):
    """Computes linear attention by exponential features."""
    if value.dtype == torch.float64:
        raise ValueError(
            "The Triton kernels add in float32. Received: values of dtype float64. Use "
            "a narrower dtype, or implementation='xla'."
        )
    dtype, value = value.dtype, representable(value)
    query, key = features
    maps = query.matrix, key.matrix, query.bias, key.bias
    term = _common(key, value.shape[2])
    if key_mask is not None:
        term = torch.where(key_mask[..., None], term, LOWEST)
    tokens, sizes = [x.x for x in features], SIZES[is_causal]
    if options.block_size is not None:
        size = triton.next_power_of_2(options.block_size)
        sizes = sizes._replace(tokens=min(max(size, 16), 128))
    return linear_attention(tokens, maps, term, value, is_causal, sizes).to(dtype)


def _common(key, num_kv_heads):
    """Returns the exponents that the features of a key share, `(B, S, K)`."""
    common = heads_first(key, num_kv_heads).settled().common
    return merge_heads(common, num_kv_heads, key.x.shape[1])[..., 0]
