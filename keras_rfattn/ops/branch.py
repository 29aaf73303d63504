"""A computation that runs only where its result is needed."""

import keras
from keras import ops

from keras_rfattn.ops.plain import is_plain


def run_if(condition, function, otherwise, operands):
    """`function(*operands)` if a condition holds, else zeros like `otherwise`.

    Args:
        condition: Boolean scalar array.
        function: Of arrays, to a tuple of arrays. Its gradient is computed from the
            operands again, so that nothing is kept for it where it does not run.
        otherwise: Tuple of arrays with the shapes and dtypes of the results.
        operands: What `function` takes.

    Returns:
        A tuple of arrays. On PyTorch the function always runs in what is compiled or
        exported, and under `torch.func`, where nobody can look at the condition.
    """
    if keras.backend.backend() == "torch":
        import torch

        # A look would cut the program of `torch.compile` in pieces, within all the
        # functions that are active, and compiling these takes minutes.
        if not is_plain(condition) or condition:
            return function(*operands)
        return tuple(torch.zeros_like(x) for x in otherwise)
    if keras.backend.backend() == "jax":
        # Else the residuals of the branch would be kept even where it is not taken.
        function = keras.remat(function)
    return ops.cond(
        condition,
        lambda: function(*operands),
        lambda: tuple(ops.zeros_like(x) for x in otherwise),
    )
