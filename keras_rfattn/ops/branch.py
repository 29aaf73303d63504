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
        A tuple of arrays. The function always runs in a program that PyTorch exports,
        and under `torch.func`, where nobody can look at the condition.
    """
    if keras.backend.backend() == "torch":
        import torch

        # `torch.compile` breaks its graph here, which costs less than the function.
        can_look = torch.compiler.is_compiling() or is_plain(condition)
        if torch.compiler.is_exporting() or not can_look or condition:
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
