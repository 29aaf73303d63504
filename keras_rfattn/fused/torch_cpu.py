"""Softmax and exponential features by PyTorch's fused attention operation on a CPU.

With features `exp(w · x + b)`, the average that a feature takes over the keys (its sum
divided by its normalizer) is softmax attention of the vector w to the keys. What a
query reads of all features is softmax attention to the vectors, with the logarithm of
each feature's normalizer added to the exponent. So features are never held in memory.
This works without gradients only, because the operation gives no gradient of the
normalizers.
"""

from typing import Any, NamedTuple

import torch

from keras_rfattn.backend import representable, wide_dtype
from keras_rfattn.backend.torch import are_values_at_hand, cast, is_differentiated
from keras_rfattn.ops.exponents import Exponents
from keras_rfattn.ops.features import LOWEST
from keras_rfattn.ops.kernel_attention import Softmax
from keras_rfattn.ops.layout import (
    block_mask,
    cut_blocks,
    heads_first,
    merge_heads,
    split_heads,
)
from keras_rfattn.ops.masks import heads_mask, hide
from keras_rfattn.ops.sums import Sums
from keras_rfattn.ops.windows import Windows, from_first_visible

# The operation that `scaled_dot_product_attention` calls; that function does not return
# the normalizers.
OPERATION = "_scaled_dot_product_flash_attention_for_cpu"

# Up to this many windows, each window weighs all others at once. With more windows
# prefix sums are used.
WINDOWS = 32


def _has_operation():
    """Returns whether the private operation exists and answers as expected here."""
    row = torch.zeros((1, 1, 1, 1), device="cpu")
    try:
        attend = getattr(torch.ops.aten, OPERATION)
        output, logs = attend(row, row, row, attn_mask=None, scale=1.0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return output.shape == (1, 1, 1, 1) and logs.shape == (1, 1, 1)


# Dynamo warns of a cached function.
HAS_OPERATION = _has_operation()


def attention(query, key, value, local=None, key_mask=None):
    """Computes attention by exponential features, without causality."""
    if not (isinstance(query, Exponents) and isinstance(key, Exponents)):
        return None
    query, key = (x.of_tokens(lambda y: cast(y, _wide(y))) for x in (query, key))
    # Attention is exact if all keys are in one window.
    is_exact = local is not None and local.window >= value.shape[1]
    if is_exact or not _is_possible(query, key, value, local):
        return None
    turn_back = None
    if local is not None and key_mask is not None:
        # Windows are counted from the first visible key.
        turn, turn_back = from_first_visible(key_mask)
        query, key, value = query.of_tokens(turn), key.of_tokens(turn), turn(value)
        key_mask = turn(key_mask)
        local = local._replace(query=turn(local.query), key=turn(local.key))
    (length, num_heads), heads = query.x.shape[1:3], value.shape[2]
    query, key = heads_first(query, heads), heads_first(key, heads)
    values = split_heads(representable(value), heads)
    if local is not None:
        size, groups = local.window, num_heads // heads
        query = query.of_tokens(lambda x: cut_blocks(x, size, groups))
        key = key.of_tokens(lambda x: cut_blocks(x, size))
        output = _in_windows(
            query, key, values, local, groups, block_mask(key_mask, length, size)
        )
        # Cuts off the padding after the end.
        output = output[:, :, : length * groups]
    else:
        mask = heads_mask(key_mask)
        averages = _average(key.hidden(mask), hide(values, mask))
        output, _ = _look_up(query, *averages)
    output = cast(merge_heads(output, num_heads, length), value.dtype)
    return output if turn_back is None else turn_back(output)


def _wide(x):
    return getattr(torch, wide_dtype(x))


def _is_possible(query, key, value, local):
    """Returns whether the operation takes these arrays."""
    sides = query, key
    if local is not None and local.kernel != Softmax():
        return False
    if torch.is_autocast_enabled("cpu") or not HAS_OPERATION:
        return False
    tokens = [x.x for x in sides] + ([] if local is None else [local.query, local.key])
    weights = (y for x in sides for y in (x.matrix, x.bias, *(x.form or ())))
    arrays = [*tokens, value, *(x for x in weights if x is not None)]
    # The operation supports neither transformations nor gradients.
    if not are_values_at_hand(*arrays) or is_differentiated(*arrays):
        return False
    if not all(x.numel() for x in (*tokens, value)):
        return False
    dtype, size = tokens[0].dtype, value.shape[-1]
    is_fit = representable(value).dtype in (dtype, torch.bfloat16)
    return is_fit and all(x.dtype == dtype and x.shape[-1] >= size for x in tokens)


def _in_windows(query, key, value, local, groups, mask):
    """Computes windowed attention `(B, K, T · G, V)`, of `Exponents` cut in windows."""
    windows = Windows(local.kernel, local.window, groups, local.sliding, False)
    near = [split_heads(x, value.shape[1]) for x in (local.query, local.key)]
    near_query, near_key, value, exists = windows.cut(*near, value, mask)
    far = Averages(*_average(key.hidden(mask), value))
    if far.logs.shape[2] <= WINDOWS:
        far = far.elsewhere(windows.nearby)
    else:
        far = Averages.of(windows.elsewhere(far.sums()))
    near_key, value, exists = map(windows.beside, (near_key, value, exists))
    visible = windows.visible(exists, mask is None)
    output = read_beside(far, query, near_query, near_key, value, visible)
    return output.flatten(2, 3)


class Averages(NamedTuple):
    """Keys and values summed per feature, and divided by the feature's normalizer."""

    means: Any  # (..., M, V)
    logs: Any  # (..., M): logarithms of the normalizers

    @classmethod
    def of(cls, sums):
        """Converts `Sums`; features that met no key get the log `LOWEST`, weight 0."""
        total = torch.where(sums.normalizer > 0, sums.normalizer, 1)
        means = (sums.numerator / total[..., None, :]).mT
        return cls(means, sums.maximum + total.log())

    def sums(self):
        """Returns the averages as `Sums`."""
        ones = torch.ones_like(self.logs)
        return Sums(self.logs, self.means.mT, ones, ones)

    def elsewhere(self, nearby):
        """Returns for each of the n windows the averages of all but `nearby` ones."""
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
        return Averages(means.transpose(2, 3), logs)


def read_beside(averages, features, query, key, value, visible):
    """Returns what queries read of `Averages` and, by softmax, of keys nearby."""
    far, far_log = _look_up(features, averages.means, averages.logs)
    common = features.settled().common
    far_log = far_log if common is None else far_log + common[..., 0]
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
    common = key.settled().common
    common = None if common is None else common.mT
    means, logs = _softmax(vectors, key.x, cast(value, key.x.dtype), common)
    return means, logs + bias


def _look_up(query, means, logs):
    """Returns what queries read of these averages, and the log of each normalizer."""
    vectors, bias = _parameters(query)
    return _softmax(query.x, vectors, means, (logs + bias)[..., None, :])


def _parameters(exponents):
    """Returns vectors `(..., M, H)` and bias `(..., M)`, shared by all blocks."""
    x, bias = exponents.x, exponents.bias
    vectors = cast(exponents.matrix, x.dtype).mT.contiguous()
    found = vectors, cast(bias, x.dtype)[..., 0, :]
    return tuple(y.unsqueeze(2) for y in found) if x.ndim == 5 else found


def _softmax(query, key, value, bias):
    """Computes softmax attention `(..., R, V)`, and logs `(..., R)` of normalizers."""
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
