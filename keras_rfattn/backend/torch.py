"""The operations that PyTorch needs in another form than `common` gives them.

Keras also converts float64 to float32 in some operations. The functions below keep
Python scalars and dtypes.

Some shortcuts read values, or overwrite an array. They are correct for plain tensors
only: not inside `torch.compile`, `torch.export` or `torch.jit.trace`, and not for
tensors of `torch.func`, of a dispatch mode or of a subclass such as `FakeTensor`.
"""

import functools
import weakref

import keras
import torch
from keras import ops

from keras_rfattn.backend import common
from keras_rfattn.backend.common import wide_dtype
from keras_rfattn.backend.sizes import heads_at_once, is_known, product

# Number of features or weights that `by_heads` takes at once, and number
# of tokens times heads that `fold` takes at once. They fit a cache.
FLOATS, TOKENS = 2**20, 2048


def accumulated_matmul(a, b, transpose_a=False, transpose_b=False, is_precise=False):
    dtype = getattr(torch, wide_dtype(a, b))
    a, b = cast(a, dtype), cast(b, dtype)
    # The exporter to ONNX swaps the wrong axes if they are negative.
    a = a.transpose(a.ndim - 2, a.ndim - 1) if transpose_a else a
    b = b.transpose(b.ndim - 2, b.ndim - 1) if transpose_b else b
    return a @ b


def clip(x, low=None, high=None):
    x = _tensor(x)

    def limit(y):
        if isinstance(y, torch.Tensor):
            return y.to(x.dtype)
        if y is None or x.dtype != torch.float16:
            return y
        # PyTorch refuses numbers beyond the range of float16.
        most = torch.finfo(x.dtype).max
        return max(-most, min(y, most))

    return x.clamp(limit(low), limit(high))


def where(condition, a, b):
    return torch.where(_tensor(condition), _tensor(a), _tensor(b))


def finite_tokens(x):
    # This norm propagates NaN, and is a single pass.
    norm = torch.linalg.vector_norm(x.detach(), float("inf"), -1, keepdim=True)
    return norm < float("inf")


def bounded(x, finite, limit):
    limit = min(limit, torch.finfo(x.dtype).max)
    # The gradient of this form of `clip` is one pass.
    return torch.nn.functional.hardtanh(x, -limit, limit).masked_fill(~finite, 0)


def take_tokens(x, index):
    # This copies whole tokens; Keras' way would read an index for each number.
    (batch, length), size = ops.shape(x)[:2], ops.shape(index)
    start = length * ops.arange(batch, dtype=index.dtype)[:, None]
    rows = x.flatten(0, 1).index_select(0, (start + index).flatten())
    return rows.reshape(*size, *x.shape[2:])


def num_blocks(length, size):
    """Returns the number of blocks; a program for any length takes one too many."""
    count = common.num_blocks(length, size)
    if is_known(length):
        return count
    count = count + 1
    if not (torch.compiler.is_exporting() and isinstance(length, torch.SymInt)):
        return count
    known = vars(length.node.shape_env).setdefault("_rfattn_blocks", {})
    key = length.node.expr, size
    if key not in known:
        symbol = torch.full((), count, dtype=torch.int64).item()
        torch._check(symbol >= 2)
        torch._check(symbol * size >= length)
        known[key] = symbol
    return known[key]


def is_plain(*arrays):
    # If PyTorch does not tell, the result is `False`, which selects the general path.
    if torch.compiler.is_compiling() or any(asked() for asked in _modes()):
        return False
    return all(_has_memory(x) for x in arrays if isinstance(x, torch.Tensor))


def known_finite(*arrays, limit):
    if not are_values_at_hand(*arrays):
        return False
    arrays = (x.detach() if x.requires_grad else x for x in arrays if x.numel())
    ranges = map(torch.aminmax, arrays)
    return all(-limit < low.item() and high.item() < limit for low, high in ranges)


def known_true(condition):
    return are_values_at_hand(condition) and condition.all().item()


def are_values_at_hand(*arrays):
    """Returns whether reading the tensors' values is correct, and cheap: on a CPU."""
    return is_plain(*arrays) and all(x.device.type == "cpu" for x in arrays)


def is_differentiated(*arrays):
    """Returns whether tensors need a gradient, in forward or reverse mode."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        return True
    unpack = torch.autograd.forward_ad.unpack_dual
    return any(unpack(x).tangent is not None for x in arrays)


def default_block_size():
    device = ops.empty(()).device.type
    return common.BLOCK_SIZES.get(device, common.DEFAULT_BLOCK_SIZE)


def fold(step, carry, blocks):
    """Takes as many blocks as fit a cache, because each operation has a fixed cost."""
    if _is_traced() or _is_on_gpu(carry):
        return step(carry, *blocks)
    leaves = [x for x in keras.tree.flatten(blocks) if x is not None]
    size = max(product(*x.shape[:2], *x.shape[3:-1]) for x in leaves)
    group = max(1, TOKENS // size)
    if group >= leaves[0].shape[2]:
        return step(carry, *blocks)
    parts = []
    for part in _cut(blocks, group, 2):
        carry, result = step(carry, *part)
        parts.append(result)
    return carry, keras.tree.map_structure(lambda *x: ops.concatenate(x, 2), *parts)


def by_heads(function, arrays, size, are_weights=False):
    if size is None or _is_traced() or _is_on_gpu(arrays):
        return function(*arrays)
    heads, count = heads_at_once(arrays, size, FLOATS)
    if heads == count:
        return function(*arrays)
    parts = [function(*part) for part in _cut(arrays, heads, 1)]
    return ops.concatenate(parts, axis=1)


def run_if(condition, function, otherwise, operands):
    """Runs the function if needed, and always where the condition cannot be read."""
    if not is_plain(condition) or condition:
        return function(*operands)
    return tuple(torch.zeros_like(x) for x in otherwise)


def fused_softmax(query, key, value, visible, is_causal):
    seen, mask, value = None, None, value.to(query.dtype)
    if visible is not None and not is_causal:
        seen = visible.any(dim=-1, keepdim=True)
        # A row that sees no key would be NaN, in the gradient too.
        mask = visible | ~seen
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=1.0
    )
    return output if seen is None else torch.where(seen, output, 0)


def without_gradients():
    return torch.no_grad()


def with_gradient(function, variables, tensors):
    """Computes the gradient at once, and keeps it instead of its inputs."""
    weights = [variable.value for variable in variables]
    inputs = (*weights, *tensors)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return function(*tensors)
    return _WithGradient.apply(function, len(weights), *inputs)


class _WithGradient(torch.autograd.Function):
    """The operation of `with_gradient`."""

    # A class for each call would keep the tensors of that call until Python looks for
    # cycles of references, as classes refer to themselves.

    @staticmethod
    def forward(ctx, function, num_weights, *inputs):
        weights, tensors = inputs[:num_weights], inputs[num_weights:]
        with torch.enable_grad():
            # Detached from the operations that computed them, whose gradient comes
            # later.
            live = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            results = function(*live)
        inputs = [*weights, *live]
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(
            torch.autograd.grad(
                results[0], wanted, allow_unused=True, materialize_grads=True
            )
        )
        ctx.gradients = [next(gradients) if x.requires_grad else None for x in inputs]
        return tuple(x.detach() for x in results)

    @staticmethod
    def backward(ctx, factor, *_):
        gradients = (None if x is None else factor * x for x in ctx.gradients)
        return None, None, *gradients


# Results of `kept` by their owner.
KEPT = weakref.WeakKeyDictionary()


def kept(owner, settings, arrays, function):
    if not are_values_at_hand(*arrays) or is_differentiated(*arrays):
        return function(settings, arrays)
    if any(x.is_inference() for x in arrays):
        return function(settings, arrays)
    # Autograd finds out by the same counter that a tensor was overwritten. Changes
    # through `.data` do not count, and are told by the sum.
    states = [(x.data_ptr(), x._version, x.sum().item()) for x in arrays]
    key = settings, torch.is_inference_mode_enabled(), states
    known = KEPT.get(owner)
    if known is None or known[0] != key:
        known = KEPT[owner] = key, arrays, function(settings, arrays)
    return known[-1]


def _tensor(x):
    """Returns a tensor for an array or variable; numbers are unchanged."""
    is_given = isinstance(x, torch.Tensor) or _is_number(x)
    return x if is_given else ops.convert_to_tensor(x)


def cast(x, dtype):
    """Returns a tensor in a dtype; even a conversion without effect has a cost."""
    x = _tensor(x)
    return x if x.dtype == dtype else x.to(dtype)


def _is_number(x):
    return isinstance(x, (int, float))


def _is_traced():
    """Returns whether PyTorch is compiling or tracing a program."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _is_on_gpu(arrays):
    """Returns whether a loop on this device costs more than all its steps at once."""
    first = next(x for x in keras.tree.flatten(arrays) if x is not None)
    return first.device.type != "cpu"


def _has_memory(x):
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    try:
        # Tensors of `torch.func` have the same class, but no memory.
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _modes():
    """Returns functions that say whether PyTorch observes all computations."""
    try:
        from torch.jit import is_tracing
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode
    except ImportError:
        return (lambda: True,)
    return is_tracing, is_in_torch_dispatch_mode


def _cut(arrays, size, axis):
    """Yields pytrees of `size` entries along an axis; arrays of size 1 go to each."""
    # `split` is used because each slice would make a gradient as large as the array.
    parts = [
        x if x is None or x.shape[axis] == 1 else x.split(size, axis)
        for x in keras.tree.flatten(arrays)
    ]
    count = max(len(x) for x in parts if isinstance(x, tuple))
    for i in range(count):
        leaves = [x[i] if isinstance(x, tuple) else x for x in parts]
        yield keras.tree.pack_sequence_as(arrays, leaves)
