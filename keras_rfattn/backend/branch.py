"""A computation that runs only where its result is needed."""

import keras
from keras import ops

from keras_rfattn.backend.plain import is_plain


def run_if(condition, function, otherwise, operands):
    """Returns `function(*operands)` if the condition holds, else zeros.

    Args:
        condition: Boolean scalar array.
        function: Function of arrays that returns a tuple of arrays. On JAX its gradient
            is recomputed from the operands, so that nothing is kept for it where it
            does not run.
        otherwise: Tuple of arrays with the shapes and dtypes of the results.
        operands: The arguments of `function`.

    Returns:
        A tuple of arrays, zeros like `otherwise` if the condition is false. PyTorch
        always runs the function in compiled or exported programs and under
        `torch.func`, where the value of the condition cannot be read.
    """
    if keras.backend.backend() == "torch":
        import torch

        # Reading the condition would break the graph of `torch.compile` into pieces, in
        # every active function, and compiling these takes minutes.
        if not is_plain(condition) or condition:
            return function(*operands)
        return tuple(torch.zeros_like(x) for x in otherwise)
    if keras.backend.backend() == "jax":
        # Without it JAX would keep the residuals of the branch even where it does not
        # run.
        function = keras.remat(function)
    return ops.cond(
        condition,
        lambda: function(*operands),
        lambda: tuple(ops.zeros_like(x) for x in otherwise),
    )
