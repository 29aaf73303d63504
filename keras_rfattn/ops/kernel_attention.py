"""Attention by the kernel that features estimate, computed for each pair of tokens.

A kernel is a frozen dataclass, so that equal kernels share compiled programs. It takes
queries `(..., R, H)`, keys `(..., S, H)` and a boolean array `visible` (`None`
if all keys are visible). It returns weights `(..., R, S)` and `shift` `(..., R)`: each
row of weights is relative to `exp(shift)`, and 0 where `visible` is false.
"""

import dataclasses
from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import (
    accumulated_matmul,
    by_heads,
    clip,
    fused_softmax,
    product,
    representable,
    where,
)
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.sums import normalize, weigh

LEAST = 1e-30  # smallest norm to divide by; a vector may be zero


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The kernel `exp(q · k)` of scaled queries and keys.

    Attributes:
        soft_cap: Positive number c that bounds the logits: the kernel becomes
            `exp(c tanh(q · k / c))`. `None` leaves them unbounded.
        has_offset: Whether attention by the kernel has a 1 in its denominator, as that
            of queries with a sink does (`sink_logits.append_sinks`).
    """

    soft_cap: float | None = None
    has_offset: bool = False
    is_signed = False

    def __call__(self, query, key, visible):
        """Returns the weights and the shift."""
        logits = _products(query, key)
        if self.soft_cap is not None:
            logits = self.soft_cap * ops.tanh(logits / self.soft_cap)
        return _exponentiate(logits, visible)


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """The kernel `(q · k)^degree`, whose attention has a 1 in its denominator.

    Attributes:
        degree: Positive even integer.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), section 2.1.
    """

    degree: int
    is_signed = False
    has_offset = True

    def __call__(self, query, key, visible):
        """Returns the weights and the shift, as those of `Softmax`."""
        (query, query_scale), (key, key_scale) = unit(query), unit(key)
        products = _products(query, key)
        scale = query_scale + ops.swapaxes(key_scale, -1, -2)
        scale, shift = _exponentiate(self.degree * scale, visible)
        return scale * products**self.degree, shift


def _products(query, key):
    return accumulated_matmul(query, key, transpose_b=True, is_precise=True)


def _exponentiate(exponent, visible):
    if visible is not None:
        exponent = where(visible, exponent, LOWEST)
    # Half of `LOWEST`, so that hidden weights vanish even in a row that sees no key.
    shift = clip(ops.amax(exponent, axis=-1), low=LOWEST / 2)
    shift = ops.stop_gradient(shift)
    return ops.exp(exponent - ops.expand_dims(shift, -1)), shift


def unit(x):
    """Returns `(x / ‖x‖, log ‖x‖)`, of shapes `(..., H)` and `(..., 1)`."""
    size = ops.amax(ops.abs(x), axis=-1, keepdims=True)
    size = ops.stop_gradient(clip(size, low=LEAST))
    x = x / size
    square = ops.sum(ops.square(x), axis=-1, keepdims=True)
    square = clip(square, low=LEAST)
    return x / ops.sqrt(square), ops.log(size) + ops.log(square) / 2


def read_exactly(kernel, query, key, value, visible):
    """Returns the `Reading` of queries `(..., R, H)` by a kernel."""
    weights, shift = kernel(query, key, visible)
    reading = weigh(weights, value, shift)
    if not kernel.has_offset:
        return reading
    # Weights may all vanish, for example those of orthogonal vectors; such a row still
    # sees keys. A softmax row has a weight of 1, and XLA is twice as fast without this.
    seen = ops.cast(shift > LOWEST / 2, reading.bound.dtype)
    return reading._replace(bound=clip(reading.bound, low=seen))


def exact_attention(
    query, key, value, kernel, key_mask=None, causal=False, prefix_mask=None
):
    """Computes attention of scaled tokens by a kernel in O(T · S)."""
    # Keys `(B, S)` in `prefix_mask` are seen by all queries although attention is
    # causal.
    num_heads, num_kv_heads = query.shape[2], value.shape[2]
    groups, length = num_heads // num_kv_heads, ops.shape(query)[1]
    dtype, value = value.dtype, representable(value)
    query = split_heads(query, num_kv_heads)
    key, value = (split_heads(x, num_kv_heads) for x in (key, value))
    mask = heads_mask(key_mask)
    key, value = hide(key, mask), hide(value, mask)
    visible = None if mask is None else ops.expand_dims(mask, -2)
    if causal:
        tokens = ops.arange(length * groups) // groups
        past = ops.expand_dims(tokens, 1) >= ops.expand_dims(ops.arange(length), 0)
        past = ops.expand_dims(past, (0, 1))
        if prefix_mask is not None:
            past = past | ops.expand_dims(heads_mask(prefix_mask), -2)
        # LiteRT has no logical `and` for arrays with five axes.
        visible = past if visible is None else where(past, visible, False)
    tokens, output = (query, key, value, visible), None
    if kernel == Softmax():
        is_plain = causal and groups == 1 and mask is None and prefix_mask is None
        output = fused_softmax(*tokens, is_plain)
    if output is None:
        size = product(query.shape[0], query.shape[2], key.shape[2])
        output = by_heads(_Whole(kernel), tokens, size, are_weights=True)
    return ops.cast(merge_heads(output, num_heads, length), dtype)


class _Whole(NamedTuple):
    """Computes `read_exactly` and `normalize`; hashable, for `by_heads`."""

    kernel: Any

    def __call__(self, *tokens):
        return normalize(read_exactly(self.kernel, *tokens), self.kernel)
