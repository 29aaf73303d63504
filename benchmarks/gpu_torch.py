"""What `gpu.py` runs on PyTorch."""

import itertools
import time

import keras
import torch

from keras_rfattn.experimental.triton import convert
from keras_rfattn.experimental.triton.plan import Sizes

HAS_GPU = torch.cuda.is_available()
NAMES = {
    "card": torch.cuda.get_device_name() if HAS_GPU else "CPU, interpreted",
    "torch": torch.__version__,
}
KERNEL = "triton"
# The dtypes of the check, and the largest relative error.
WIDE, NARROW, TOLERANCE = "float64", "float32", 1e-4
# The sizes in use come first, then those that are most likely to be faster.
CANDIDATES = [
    Sizes(tokens=tokens, blocks=blocks, warps=warps)
    for blocks, (tokens, warps) in itertools.product(
        (8, 16), ((32, 8), (32, 4), (64, 4), (64, 8), (128, 8))
    )
]


def milliseconds(run):
    """Returns the time of one call."""
    if not HAS_GPU:
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def arrays(values, dtype):
    """Returns arrays that need gradients, on the GPU."""
    place = {"device": "cuda" if HAS_GPU else "cpu", "dtype": getattr(torch, dtype)}
    return [torch.tensor(x, **place, requires_grad=True) for x in values]


def to_numpy(x):
    return x.detach().double().cpu().numpy()


def runs(attention, arrays, backward, causal=None, sizes=None):
    """Returns a function that runs attention, and returns gradients if `backward`."""

    def run():
        if sizes is not None:
            convert.SIZES[causal] = sizes
        with torch.set_grad_enabled(backward):
            output = attention(*arrays)
            return torch.autograd.grad(output.sum(), arrays) if backward else output

    return run


def softmax(causal):
    """Returns PyTorch's softmax attention."""

    def attention(*arrays):
        heads_first = [x.transpose(1, 2) for x in arrays]
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*heads_first, is_causal=causal)

    return attention


def runs_model(model, inputs, training):
    """Returns a function that runs a model, with gradients if `training`."""
    weights = [v.value for v in model.trainable_variables]

    def run():
        with torch.set_grad_enabled(training):
            outputs = keras.tree.flatten(model(inputs))
            loss = sum(x.float().square().mean() for x in outputs)
            if training:
                torch.autograd.grad(loss, weights, allow_unused=True)

    return run
