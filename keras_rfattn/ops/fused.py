"""Softmax attention by PyTorch's fused operation on a CPU, and exponentials by it.

With features `exp(w · x + b)`, what a feature sums over the keys is, but for its
normalizer, softmax attention of the vector w to the keys; and what a query reads of all
features is softmax attention to the vectors, each with the logarithm of its normalizer
in the exponent. So no feature is ever in memory. Without gradients, as the operation
gives none of the normalizers.
"""

from typing import Any
from typing import NamedTuple

import keras

from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.features import Exponents
from keras_rfattn.ops.sizes import is_traced
from keras_rfattn.ops.sums import Sums

# What `scaled_dot_product_attention` calls, which keeps the normalizers to itself.
OPERATION = "_scaled_dot_product_flash_attention_for_cpu"

# Up to so many windows, each weighs all others at once; beyond, sums pass from one to
# the next.
WINDOWS = 32


def is_fused(query, key, value, *others):
    """Whether these are for this module.

    Args:
        query: `Marked`, of `Exponents` or others.
        key: Likewise.
        value: Array of shape `(..., S, V)`.
        others: Queries and keys of softmax, where it is asked besides.
    """
    if keras.backend.backend() != "torch":
        return False
    if not all(isinstance(x.features, Exponents) for x in (query, key)):
        return False
    import torch
    from torch.autograd import forward_ad

    is_recorded = is_traced() or forward_ad._current_level >= 0
    is_cast = torch.is_autocast_enabled("cpu")
    if is_recorded or is_cast or not hasattr(torch.ops.aten, OPERATION):
        return False
    tokens = key.features.x, query.features.x, *others
    arrays = (*query.features, *key.features, value, *others)
    arrays = [x for x in arrays if x is not None]
    if any(x.device.type != "cpu" or not x.numel() for x in arrays):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        return False
    dtype, size = tokens[0].dtype, value.shape[-1]
    is_fit = value.dtype in (dtype, torch.bfloat16)
    return is_fit and all(x.dtype == dtype and x.shape[-1] >= size for x in tokens)


class Averages(NamedTuple):
    """Keys and values summed per feature, and divided by its normalizer."""

    means: Any  # (..., M, V)
    logs: Any  # (..., M): of the normalizers
    spoiled: Any  # (...): NaN if a key or value was not finite, else 0

    @classmethod
    def of(cls, sums):
        """Those of `Sums`; of no key, what weighs nothing beside any."""
        import torch

        total = torch.where(sums.normalizer > 0, sums.normalizer, 1)
        means = (sums.numerator / total[..., None, :]).mT
        return cls(means, sums.maximum + total.log(), sums.spoiled)

    def sums(self):
        """As `Sums`."""
        import torch

        ones = torch.ones_like(self.logs)
        return Sums(self.logs, self.means.mT, ones, ones, self.spoiled)

    def elsewhere(self, nearby):
        """Of all windows `(B, K, n, ...)` but those `nearby`, for each of them."""
        import torch

        window = torch.arange(self.logs.shape[2], device="cpu")
        offset = window - window[:, None]
        is_near = (offset >= nearby[0]) & (offset <= nearby[-1])
        logs = torch.where(is_near, LOWEST, self.logs.mT[..., None, :])
        shift = logs.amax(-1, keepdim=True).clamp(min=LOWEST / 2)
        weights = (logs - shift).exp()
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1)
        means = (weights / total) @ self.means.transpose(2, 3)
        logs = (shift + total.log()).squeeze(-1).mT
        spoiled = torch.where(is_near, 0, self.spoiled[:, :, None]).sum(-1)
        return Averages(means.transpose(2, 3), logs, spoiled)


def attend(query, key, value):
    """What queries read of all keys, but for marks: `(..., R, V)`.

    Args:
        query: `Exponents`.
        key: `Exponents`, as `admit` gives them; likewise `value`.
    """
    return _look_up(query, *_average(key, value))[0]


def summarize(key, value):
    """`Averages` of what `admit` gives, as `sums.summarize` gives `Sums`."""
    return Averages(*_average(key.features, value), key.spoiled[..., 0].sum(-1))


def read_beside(averages, features, query, key, value, visible):
    """What queries read of `Averages`, and by softmax of what is beside them.

    Args:
        averages: `Averages`.
        features: `Exponents` of the queries, of softmax.
        query: Finite, `(..., R, H)`.
        key: Likewise, `(..., S, H)`.
        value: Likewise, `(..., S, V)`.
        visible: Boolean array that broadcasts to `(..., R, S)`, or `None` for all.
    """
    import torch

    far, far_log = _look_up(features, averages.means, averages.logs)
    far_log = far_log if features.common is None else far_log + features.common[..., 0]
    mask = None
    if visible is not None:
        mask = torch.where(visible, 0.0, LOWEST).to(query.dtype)
    near, near_log = _softmax(query, key, value.to(query.dtype), mask)
    if visible is not None:
        # Of a row that sees none of them.
        near = torch.where((near_log > LOWEST / 2)[..., None], near, 0)
    return torch.lerp(near, far, torch.sigmoid(far_log - near_log)[..., None])


def _average(key, value):
    """What features sum over keys by their normalizers, and the logarithms of these."""
    vectors, bias = _parameters(key)
    common = None if key.common is None else key.common.mT
    means, logs = _softmax(vectors, key.x, value.to(key.x.dtype), common)
    return means, logs + bias


def _look_up(query, means, logs):
    """What queries read of that, and the logarithms of their normalizers."""
    vectors, bias = _parameters(query)
    return _softmax(query.x, vectors, means, (logs + bias)[..., None, :])


def _parameters(exponents):
    """Vectors `(..., M, H)` and bias `(..., M)`, the same for all blocks."""
    vectors, bias = (
        x.to(exponents.x.dtype) for x in (exponents.vectors, exponents.bias)
    )
    found = vectors.mT.contiguous(), bias[..., 0, :]
    is_cut = exponents.x.ndim == 5
    return tuple(x.unsqueeze(2) for x in found) if is_cut else found


def _softmax(query, key, value, bias):
    """Softmax attention, and the logarithms of its normalizers.

    Args:
        query: Array that broadcasts to `(B, K, R, H)`, or to `(B, K, n, R, H)` of
            n blocks.
        key: Likewise, of S keys.
        value: Likewise, V numbers of which there are at most H.
        bias: Of exponents, an array that broadcasts to `(..., R, S)`, or `None`.

    Returns:
        `(..., R, V)` and `(..., R)`.
    """
    import torch

    size = value.shape[-1]
    if size < key.shape[-1]:
        # It takes values as long as keys.
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - size))

    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))

    def rows(x):
        # It takes numbers of a row to stand side by side,
        x = x if x.stride(-1) == 1 else x.contiguous()
        x = x.expand(*lead, *x.shape[-2:])
        # and knows one axis of rows.
        return x.transpose(1, 2).flatten(0, 1) if len(lead) == 3 else x

    query, key, value = map(rows, (query, key, value))
    if bias is not None:
        bias = rows(bias).expand(-1, -1, query.shape[-2], key.shape[-2])
    attend = getattr(torch.ops.aten, OPERATION)
    found = attend(query, key, value, attn_mask=bias, scale=1.0)
    if len(lead) == 3:
        found = (x.unflatten(0, lead[::2]).transpose(1, 2) for x in found)
    output, logs = found
    return output[..., :size], logs
