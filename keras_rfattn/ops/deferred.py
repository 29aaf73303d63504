"""Features that an algorithm computes when and where it needs them.

They have the interface of `Features`, so algorithms need not tell them apart: call
`layout.heads_first`, then `hidden`, and `compute` right before the features are read.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import add_into, affine, exp_into, where, wide_dtype
from keras_rfattn.ops.features import LOWEST, Features


class Deferred(NamedTuple):
    """Features yet to be computed, so that an algorithm need not hold all at once.

    Attributes:
        function: Pure function `(x, parameters) -> Features`, from shape `(..., N, H)`
            to `(..., N, M)`. It must be hashable: calls with equal functions share a
            compiled program. Its method `heads_first` takes `x` of shape
            `(B, K, R, H)`, in which the query heads of a token are adjacent rows.
        x: Array of shape `(..., N, H)`.
        parameters: Pytree of arrays.
    """

    function: Any
    x: Any
    parameters: Any

    @property
    def num_heads(self):
        """The size of the head axis (the axis before the last)."""
        return self.x.shape[-2]

    @property
    def num_tokens(self):
        """The size of the token axis (axis 1)."""
        return self.x.shape[1]

    def of_tokens(self, function):
        """Returns features of tokens that a function has moved."""
        return self._replace(x=function(self.x))

    def compute(self):
        """Returns the `Features`."""
        return self.function(self.x, self.parameters)


class Scaled(NamedTuple):
    """A function for `Deferred` that scales its input, in float32 or wider.

    Attributes:
        function: The function that takes the scaled input; see `Deferred`.
        factor: Number by which the input is multiplied.
    """

    function: Any
    factor: float

    def __call__(self, x, parameters):
        return self.function(self._scaled(x), parameters)

    def heads_first(self, x, parameters):
        """Returns what `function.heads_first` gives for the scaled input."""
        return self.function.heads_first(self._scaled(x), parameters)

    def exponents(self, x, parameters):
        """Returns what `function.exponents` gives for the scaled input."""
        return self.function.exponents(self._scaled(x), parameters)

    def _scaled(self, x):
        return self.factor * ops.cast(x, wide_dtype(x))


class Fresh(Features):
    """Exponential features that no other object holds, so that they are overwritten.

    An algorithm that reads them twice makes `Features` of them first.
    """

    def raised(self, maximum):
        """Returns features whose exponents are larger by an array that broadcasts."""
        return self._replace(log_scale=add_into(self.log_scale, maximum))

    def expand(self, shift, dtype):
        """Returns `exp(log_scale - shift)`, rounded once, to `dtype`."""
        return ops.cast(exp_into(self.log_scale, shift), dtype)


class Exponents(NamedTuple):
    """Exponential features before they are computed: `x · vectors + bias + common`.

    Attributes:
        x: Array of shape `(B, ..., N, H)`, or `(B, K, R, H)` in heads-first layout.
        vectors: Array of shape `(B or 1, K, H, M)`; the N / K query heads of a key head
            share it.
        bias: Array of shape `(B or 1, K, 1, M)`.
        common: Array of shape `(..., 1)`: the exponent term that all features of a
            token share. `None` for 0.
    """

    x: Any
    vectors: Any
    bias: Any
    common: Any = None

    is_exponential = True
    is_signed = False
    has_offset = False

    @property
    def width(self):
        """The number of features per token."""
        return self.vectors.shape[-1]

    def of_tokens(self, function):
        """Returns `Exponents` of tokens that a function has moved."""
        common = None if self.common is None else function(self.common)
        return self._replace(x=function(self.x), common=common)

    def hidden(self, mask):
        """Returns `Exponents`, heads first, in which hidden keys are at `LOWEST`."""
        if mask is None:
            return self
        common = self.common
        common = ops.zeros_like(self.x[..., :1]) if common is None else common
        mask = ops.expand_dims(mask, -1)
        x = where(mask, self.x, 0)
        return self._replace(x=x, common=where(mask, common, LOWEST))

    def relative(self):
        """Returns features without the factor that all features of a token share.

        It cancels between the numerator and the denominator of a query.
        """
        return self._replace(common=None)

    def compute(self):
        """Returns `Fresh` features of shape `(B, K, R, M)`, heads first."""
        terms = (self.bias,) if self.common is None else (self.bias, self.common)
        return Fresh(None, affine(self.x, self.vectors, *terms))
