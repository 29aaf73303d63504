"""Converts the features of a model to the arguments of the Mosaic GPU kernels."""

import jax.numpy as jnp

from keras_rfattn.fused.mosaic.blocks import SIZE
from keras_rfattn.fused.mosaic.linear import linear_attention
from keras_rfattn.ops.deferred import Scaled
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import heads_first

# Number of blocks of 64 tokens that a program computes, and the largest sizes of heads
# for which a program's arrays fit in shared memory.
BLOCKS, LARGEST = 8, 128


def attention(deferred, value, key_mask, is_causal, options):
    """Computes linear attention by exponential features.

    Args:
        deferred: The `Deferred` features of queries `(B, T, N, H)` and keys
            `(B, S, K, H)`, both finite.
        value: Array of shape `(B, S, K, V)`, finite; its dtype is the compute dtype.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.
        is_causal: Whether query i sees only keys `j <= i`.
        options: `ops.Options`. A program computes `block_size` tokens, rounded up to a
            multiple of 64, 512 by default.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.

    Raises:
        ValueError: If the values are neither bfloat16 nor float16, or heads are larger
            than 128.
    """
    if value.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            "The Mosaic kernels multiply numbers of 16 bits. Received: values of dtype "
            f"{value.dtype}. Use a dtype policy such as 'mixed_bfloat16', or "
            "implementation='xla'."
        )
    num_kv_heads = value.shape[2]
    tokens = [_narrow(x.x, value.dtype) for x in deferred]
    # A float32 token takes the place of two.
    width = tokens[0].shape[-1] * (1 if tokens[0].dtype == value.dtype else 2)
    if max(width, value.shape[-1]) > LARGEST:
        raise ValueError(
            f"The Mosaic kernels have heads of at most {LARGEST} numbers, and half of "
            "that if the map changes its tokens in float32. Received: queries of shape "
            f"{tokens[0].shape} and dtype {tokens[0].dtype}, values of shape "
            f"{value.shape}. Use implementation='xla'."
        )
    (query_vectors, query_bias), (key_vectors, key_bias) = (
        _affine(x, num_kv_heads) for x in deferred
    )
    maps = query_vectors, key_vectors, query_bias, key_bias
    term = heads_first(deferred[1], num_kv_heads).common[..., 0]
    if key_mask is not None:
        term = jnp.where(key_mask[:, None], term, LOWEST)
    size = options.block_size
    blocks = BLOCKS if size is None else -(-size // SIZE)
    return linear_attention(tuple(tokens), maps, term, value, is_causal, blocks)


def _narrow(x, dtype):
    """Returns tokens in a dtype that the kernels take: that of the values, or float32.

    Tokens of any other dtype are widened.
    """
    return x if x.dtype == dtype else x.astype(jnp.float32)


def _affine(features, num_kv_heads):
    """Returns vectors and bias that give the exponents of the tokens as they are.

    A feature map may scale and center its tokens first. The token 0 shows the center.
    What all features share is not part of it.
    """
    function = features.function
    factor = function.factor if isinstance(function, Scaled) else 1.0
    zero = jnp.zeros((1, num_kv_heads, 1, features.x.shape[-1]), jnp.float32)
    at_zero = function.heads_first(zero, features.parameters)
    center = jnp.einsum(
        "bkth,bkhm->bktm", at_zero.x, at_zero.vectors, precision="highest"
    )
    return factor * at_zero.vectors, at_zero.bias + center
