"""Converts the features of a model to the arguments of the Triton kernels."""

from typing import Any, NamedTuple

import torch
import triton

from keras_rfattn.backend import representable
from keras_rfattn.fused.triton.launch import linear_attention
from keras_rfattn.fused.triton.plan import Sizes
from keras_rfattn.fused.triton.windowed import Nearby, windowed_attention
from keras_rfattn.ops.deferred import Scaled
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.windows import from_first_visible

# How the kernels divide the work, by causality, unless options ask for a block size.
# With 64 tokens the causal kernels need more registers than an H100 has.
SIZES = {True: Sizes(tokens=32), False: Sizes(tokens=64)}


def attention(deferred, value, key_mask, is_causal, options):
    """Computes linear attention by exponential features.

    Args:
        deferred: The `Deferred` features of queries `(B, T, N, H)` and keys
            `(B, S, K, H)`, both finite.
        value: Array of shape `(B, S, K, V)`, finite; its dtype is the compute dtype.
        key_mask: Optional booleans of shape `(B, S)`, true for visible keys.
        is_causal: Whether query i sees only keys `j <= i`.
        options: `ops.Options`. Its `block_size` is rounded up to a power of two in
            [16, 128].

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.

    Raises:
        ValueError: If the dtype is float64.
    """
    if value.dtype == torch.float64:
        raise ValueError(
            "The Triton kernels add in float32. Received: values of dtype float64. Use "
            "a narrower dtype, or implementation='xla'."
        )
    turn_back, window = None, options.window
    if window is not None and key_mask is not None:
        # Windows and sinks are counted from the first visible key.
        turn, turn_back = from_first_visible(key_mask, is_causal)
        deferred = [x.of_tokens(turn) for x in deferred]
        value, key_mask = turn(value), turn(key_mask)
    dtype, value = value.dtype, representable(value)
    num_kv_heads = value.shape[2]
    of_query, of_key = (_affine(x, num_kv_heads) for x in deferred)
    maps = of_query.vectors, of_key.vectors, of_query.bias, of_key.bias
    term = _common(deferred[1], of_key.shift)
    if key_mask is not None:
        term = torch.where(key_mask[..., None], term, LOWEST)
    # The terms of queries cancel, unless features differ in them.
    needs_both = window is not None or len(term) > 1
    terms = _common(deferred[0], of_query.shift) if needs_both else None, term
    tokens, sizes = [x.x for x in deferred], SIZES[is_causal]
    if window is None:
        if options.block_size is not None:
            size = triton.next_power_of_2(options.block_size)
            sizes = sizes._replace(tokens=min(max(size, 16), 128))
        output = linear_attention(tokens, maps, terms, value, is_causal, sizes)
    else:
        scale = _factor(deferred[0]) * _factor(deferred[1])
        nearby = Nearby(window, int(options.sliding), options.sinks, scale)
        output = windowed_attention(
            tokens, maps, terms, value, is_causal, nearby, sizes
        )
    output = output if turn_back is None else turn_back(output)
    return output.to(dtype)


class _Affine(NamedTuple):
    """The exponents of a token x: `x · vectors + bias`, plus what features share.

    Attributes:
        vectors: Array of shape `(B or 1, K, H, M)`.
        bias: Array of shape `(B or 1, K, 1, M)`.
        shift: Array of shape `(1, K, 1, H)`, which the map adds to scaled tokens.
    """

    vectors: Any
    bias: Any
    shift: Any


def _common(features, shift):
    """Returns the exponents that groups of features share, `(groups, B, T, N)`."""
    _, length, num_heads, _ = features.x.shape
    x = _factor(features) * features.x.to(shift.dtype)
    x = split_heads(x, shift.shape[1]) + shift
    common = features.function.common(x, features.parameters)
    return merge_heads(common, num_heads, length).permute(3, 0, 1, 2)


def _factor(features):
    """Returns the number by which the features scale their tokens."""
    function = features.function
    return function.factor if isinstance(function, Scaled) else 1.0


def _affine(features, num_kv_heads):
    """Returns the `_Affine` exponents, which take the tokens as they are.

    A feature map may scale and center its tokens first. The token 0 shows the center.
    """
    zero = features.x.new_zeros((1, num_kv_heads, 1, features.x.shape[-1]))
    at_zero = features.function.exponents(zero, features.parameters)
    bias = at_zero.bias + at_zero.x @ at_zero.vectors
    return _Affine(_factor(features) * at_zero.vectors, bias, at_zero.x)
