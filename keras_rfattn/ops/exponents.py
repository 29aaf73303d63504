"""Exponential features `exp(x · matrix + bias + common)` that are computed when needed.

They have the interface of `Features`, so algorithms need not tell them apart: call
`layout.heads_first`, then `hidden`, and `compute` right before the features are read.
An algorithm that goes block by block never holds the features of more than one block.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import accumulated_matmul, where, wide_dtype
from keras_rfattn.ops.features import LOWEST, Features
from keras_rfattn.ops.layout import merge_heads, split_heads


class Form(NamedTuple):
    """The term `-‖x · matrix + offset‖² / 2` that all features of a token share."""

    matrix: Any  # (1, K, H, H), or a number as an array (1, 1, 1, 1)
    offset: Any = None  # (1, K, 1, H), or `None` for 0

    def __call__(self, x):
        """Returns the term of tokens `(B, K, R, H)`, of shape `(B, K, R, 1)`."""
        if self.offset is None:
            factor = self.matrix * self.matrix / -2
            return factor * ops.sum(x * x, axis=-1, keepdims=True)
        z = _products(x, self.matrix) + _fitting(self.offset, x)
        return ops.sum(z * z, axis=-1, keepdims=True) / -2


class Exponents(NamedTuple):
    """Exponential features before they are computed: `x · matrix + bias + common`."""

    x: Any  # tokens (B, T, N, H), or heads first (B, K, R, H), in any float dtype
    matrix: Any  # (B or 1, K, H, M), shared by the N / K query heads of a key head
    bias: Any  # (B or 1, K, 1, M)
    form: Any = None  # `Form` of the exponent that all features of a token share
    common: Any = None  # that exponent, (B, K, R, 1), once it is computed

    is_exponential = True
    is_signed = False
    has_offset = False
    values = None
    num_heads = property(lambda self: self.x.shape[-2])
    width = scale_width = property(lambda self: self.matrix.shape[-1])

    @property
    def scale_dtype(self):
        """The dtype of the exponents."""
        return wide_dtype(self.x)

    @property
    def log_scale(self):
        """The exponents of tokens `(..., N, H)`, computed: `(..., N, M)`."""
        return self.dense().log_scale

    def of_tokens(self, function):
        """Returns `Exponents` of tokens that a function has moved."""
        common = None if self.common is None else function(self.common)
        return self._replace(x=function(self.x), common=common)

    def of_heads(self, of_tokens, of_weights):
        """Returns `Exponents` of some heads, which two functions take from arrays."""
        form = self.form
        if form is not None:
            form = Form(of_weights(form.matrix), of_weights(form.offset))
        matrix, bias = of_weights(self.matrix), of_weights(self.bias)
        return self.of_tokens(of_tokens)._replace(matrix=matrix, bias=bias, form=form)

    def tokens(self):
        """Returns the part that has an entry for each token."""
        return self._replace(matrix=None, bias=None, form=None)

    def shared(self):
        """Returns the part that all tokens share, for `joined`."""
        return self.matrix, self.bias, self.form

    def joined(self, shared):
        """Returns the whole of which this is the part `tokens`."""
        matrix, bias, form = shared
        return self._replace(matrix=matrix, bias=bias, form=form)

    def hidden(self, mask):
        """Returns `Exponents`, heads first, in which hidden keys are at `LOWEST`."""
        if mask is None:
            return self
        mask = ops.expand_dims(mask, -1)
        x = where(mask, self.x, 0)
        common = self._replace(x=x).settled().common
        common = ops.zeros_like(x[..., :1]) if common is None else common
        return self._replace(x=x, form=None, common=where(mask, common, LOWEST))

    def raised(self, maximum):
        """Returns features, heads first, whose exponents are larger by an array."""
        return self._replace(bias=self.bias + maximum)

    def relative(self):
        """Returns features without their common factor, which cancels for a query."""
        return self._replace(form=None, common=None)

    def settled(self):
        """Returns `Exponents`, heads first, with `common` computed."""
        if self.form is None:
            return self
        common = self.form(ops.cast(self.x, self.scale_dtype))
        return self._replace(form=None, common=common)

    def compute(self):
        """Returns `Features` of shape `(B, K, R, M)`, heads first, or in blocks."""
        if len(self.x.shape) == 5:
            # The product takes rows of tokens, so the blocks are joined for it.
            batch, heads, count, rows, _ = ops.shape(self.x)
            joined = batch, heads, count * rows
            flat = self.of_tokens(lambda x: ops.reshape(x, (*joined, x.shape[-1])))
            blocks = batch, heads, count, rows
            return flat.compute().of_tokens(
                lambda x: ops.reshape(x, (*blocks, x.shape[-1]))
            )
        x, common = ops.cast(self.x, self.scale_dtype), self.settled().common
        scale = _products(x, self.matrix)
        # In place on PyTorch, where fresh memory costs more than the sum.
        scale += _fitting(self.bias, x)
        if common is not None:
            scale += common
        return Features(None, scale)

    def dense(self):
        """Returns `Features` of tokens `(..., N, H)`, in the layout of the tokens."""
        shape = ops.shape(self.x)
        x = ops.reshape(self.x, (shape[0], -1, *shape[-2:]))
        length = ops.shape(x)[1]
        x = split_heads(x, self.matrix.shape[1])
        scale = self._replace(x=x).compute().log_scale
        scale = merge_heads(scale, self.num_heads, length)
        return Features(None, ops.reshape(scale, (*shape[:-1], self.width)))


def _products(x, vectors):
    return accumulated_matmul(x, _fitting(vectors, x), is_precise=True)


def _fitting(weight, x):
    """Returns a weight as tokens have it: in their dtype, and blocks on axis 2."""
    weight = ops.cast(weight, x.dtype)
    return ops.expand_dims(weight, 2) if len(x.shape) > len(weight.shape) else weight
