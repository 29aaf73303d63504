"""Softmax and exponential features by PyTorch's fused attention operation on a CPU.

With features `exp(w · x + b)`, the average that a feature takes over the keys (its sum
divided by its normalizer) is softmax attention of the vector w to the keys. What a
query reads of all features is softmax attention to the vectors, with the logarithm of
each feature's normalizer added to the exponent. So features are never held in memory.
This works without gradients only, because the operation gives no gradient of the
normalizers.
"""

import functools
from typing import Any, NamedTuple

import keras

from keras_rfattn.backend.plain import are_values_at_hand, is_differentiated
from keras_rfattn.ops.features import LOWEST, Exponents
from keras_rfattn.ops.sums import Sums

# The operation that `scaled_dot_product_attention` calls; that function does not return
# the normalizers.
OPERATION = "_scaled_dot_product_flash_attention_for_cpu"

# Up to this many windows, each window weighs all others at once. With more windows
# prefix sums are used.
WINDOWS = 32


@functools.cache
def has_operation():
    """Returns whether the private operation exists and answers as expected here."""
    import torch

    row = torch.zeros((1, 1, 1, 1), device="cpu")
    try:
        attend = getattr(torch.ops.aten, OPERATION)
        output, logs = attend(row, row, row, attn_mask=None, scale=1.0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return output.shape == (1, 1, 1, 1) and logs.shape == (1, 1, 1)


def is_fused(query, key, value, *others):
    """Returns whether this module can compute attention of these arrays.

    Args:
        query: `Marked` query features, `Exponents` or others.
        key: `Marked` key features, `Exponents` or others.
        value: Array of shape `(..., S, V)`.
        others: Queries and keys of exact softmax attention, if that is needed too.
    """
    if keras.backend.backend() != "torch":
        return False
    if not all(isinstance(x.features, Exponents) for x in (query, key)):
        return False
    import torch

    if torch.is_autocast_enabled("cpu") or not has_operation():
        return False
    tokens = key.features.x, query.features.x, *others
    arrays = (*query.features, *key.features, value, *others)
    arrays = [x for x in arrays if x is not None]
    # The operation supports neither transformations nor gradients.
    if not are_values_at_hand(*arrays) or is_differentiated(*arrays):
        return False
    if not all(x.numel() for x in arrays):
        return False
    dtype, size = tokens[0].dtype, value.shape[-1]
    is_fit = value.dtype in (dtype, torch.bfloat16)
    return is_fit and all(x.dtype == dtype and x.shape[-1] >= size for x in tokens)


class Averages(NamedTuple):
    """Keys and values summed per feature, and divided by the feature's normalizer."""

    means: Any  # (..., M, V)
    logs: Any  # (..., M): logarithms of the normalizers
    spoiled: Any  # (...): NaN if a key or value was not finite, else 0

    @classmethod
    def of(cls, sums):
        """Converts `Sums`; features that met no key get the log `LOWEST`, weight 0."""
        import torch

        total = torch.where(sums.normalizer > 0, sums.normalizer, 1)
        means = (sums.numerator / total[..., None, :]).mT
        return cls(means, sums.maximum + total.log(), sums.spoiled)

    def sums(self):
        """Returns the averages as `Sums`."""
        import torch

        ones = torch.ones_like(self.logs)
        return Sums(self.logs, self.means.mT, ones, ones, self.spoiled)

    def elsewhere(self, nearby):
        """Returns for each of the n windows the averages of all but `nearby` ones."""
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
    """Returns what queries read of all keys, `(..., R, V)`, without NaN propagation.

    Args:
        query: `Exponents` of the queries.
        key: `Exponents` of the keys, as returned by `admit`.
        value: Values, as returned by `admit`.
    """
    return _look_up(query, *_average(key, value))[0]


def summarize(key, value):
    """Returns the `Averages` of the keys and values that `admit` returned."""
    return Averages(*_average(key.features, value), key.spoiled[..., 0].sum(-1))


def read_beside(averages, features, query, key, value, visible):
    """Returns what queries read of `Averages` and, by softmax, of keys nearby.

    Args:
        averages: `Averages` of the keys that features summarize.
        features: `Exponents` of the queries; their kernel is softmax.
        query: Finite queries of shape `(..., R, H)`.
        key: Finite keys nearby, of shape `(..., S, H)`.
        value: Finite values nearby, of shape `(..., S, V)`.
        visible: Boolean array that broadcasts to `(..., R, S)`, or `None` if all keys
            are visible.
    """
    import torch

    far, far_log = _look_up(features, averages.means, averages.logs)
    far_log = far_log if features.common is None else far_log + features.common[..., 0]
    mask = None
    if visible is not None:
        mask = torch.where(visible, 0.0, LOWEST).to(query.dtype)
    near, near_log = _softmax(query, key, value.to(query.dtype), mask)
    if visible is not None:
        # A row that sees none of the keys nearby has no meaningful average of them.
        near = torch.where((near_log > LOWEST / 2)[..., None], near, 0)
    return torch.lerp(near, far, torch.sigmoid(far_log - near_log)[..., None])


def _average(key, value):
    """Returns each feature's average over the keys, and the log of its normalizer."""
    vectors, bias = _parameters(key)
    common = None if key.common is None else key.common.mT
    means, logs = _softmax(vectors, key.x, value.to(key.x.dtype), common)
    return means, logs + bias


def _look_up(query, means, logs):
    """Returns what queries read of these averages, and the log of each normalizer."""
    vectors, bias = _parameters(query)
    return _softmax(query.x, vectors, means, (logs + bias)[..., None, :])


def _parameters(exponents):
    """Returns vectors `(..., M, H)` and bias `(..., M)`, shared by all blocks."""
    vectors, bias = (
        x.to(exponents.x.dtype) for x in (exponents.vectors, exponents.bias)
    )
    found = vectors.mT.contiguous(), bias[..., 0, :]
    is_cut = exponents.x.ndim == 5
    return tuple(x.unsqueeze(2) for x in found) if is_cut else found


def _softmax(query, key, value, bias):
    """Computes softmax attention, and the logarithms of its normalizers.

    Args:
        query: Array that broadcasts to `(B, K, R, H)`, or to `(B, K, n, R, H)` for n
            blocks.
        key: Array that broadcasts to `(B, K, S, H)`, or to `(B, K, n, S, H)` for n
            blocks.
        value: Array of the shape of `key` except for its last axis, whose size V is at
            most H.
        bias: Array that broadcasts to `(..., R, S)` and is added to the exponents, or
            `None` for 0.

    Returns:
        Tuple of the output `(..., R, V)` and the logarithms `(..., R)`.
    """
    import torch

    size = value.shape[-1]
    if size < key.shape[-1]:
        # The operation needs values as wide as keys.
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - size))

    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))

    def rows(x):
        # The operation needs the entries of a row to be contiguous,
        x = x if x.stride(-1) == 1 else x.contiguous()
        x = x.expand(*lead, *x.shape[-2:])
        # and takes two leading axes only, so blocks join the batch.
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
