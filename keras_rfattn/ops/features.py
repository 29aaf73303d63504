"""What feature maps return to the algorithms: `values · exp(log_scale)`.

The exponent is carried along and not applied, so that an algorithm can choose shifts
that cancel between numerator and denominator. Then nothing overflows, and no epsilon is
needed.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_rfattn.backend import accumulated_matmul, where
from keras_rfattn.ops.masks import hide

# Stands for -inf in exponents. It is finite, so that the difference of two such
# exponents is 0 and not NaN.
LOWEST = -1e30


class Features(NamedTuple):
    """Random features of queries or of keys: `values * exp(log_scale)`.

    Attributes:
        values: Array of shape `(..., M)` with magnitudes at most 1, or `None` if every
            value is 1 (positive maps, which put everything in the exponent).
        log_scale: Array of shape `(..., M)`, or `(..., 1)` if all features of a token
            share one exponent; float32 or float64.
    """

    values: Any
    log_scale: Any

    # Whether attention over these features has a 1 in its denominator.
    has_offset = False

    @property
    def num_heads(self):
        """The size of the head axis (the axis before the last)."""
        return self.log_scale.shape[-2]

    @property
    def is_exponential(self):
        """Whether every value is 1, so that the exponents are the whole feature."""
        return self.values is None

    @property
    def is_signed(self):
        """Whether values have signs, so that a sum of products may cancel."""
        return not self.is_exponential

    @property
    def width(self):
        """The number of features per token."""
        return (self.log_scale if self.values is None else self.values).shape[-1]

    @property
    def shares_scale(self):
        """Whether all features of a token have one exponent."""
        return self.values is not None and self.log_scale.shape[-1] == 1

    def of_tokens(self, function):
        """Returns features with a function of token arrays applied to all parts."""
        return type(self)(*(None if x is None else function(x) for x in self))

    def of_heads(self, of_tokens, of_weights):
        """Returns the features of some heads, by a function that selects them."""
        return self.of_tokens(of_tokens)

    @property
    def scale_width(self):
        """The size of the last axis of `log_scale`: M or 1."""
        return self.log_scale.shape[-1]

    @property
    def scale_dtype(self):
        """The dtype of the exponents."""
        return self.log_scale.dtype

    def unchanged(self):
        """Returns these features, which need no further computation."""
        return self

    # The protocol that `ops.exponents.Exponents`, computed later, shares.
    compute = dense = relative = tokens = unchanged

    def shared(self):
        """Returns the part that all tokens share, which only `Exponents` have."""
        return ()

    def joined(self, shared):
        """Returns these features: they share nothing that must be added."""
        return self

    def ones_or_values(self):
        """Returns the values, or ones if `values` is `None`."""
        return ops.ones_like(self.log_scale) if self.values is None else self.values

    def expand(self, shift, dtype):
        """Returns `values * exp(log_scale - shift)`, rounded once, to `dtype`."""
        scale = ops.exp(self.log_scale - shift)
        if self.values is not None:
            scale = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(scale, dtype)

    def raised(self, shift):
        """Returns the features with `shift` added to their exponents."""
        return self._replace(log_scale=self.log_scale + shift)

    def magnitudes(self, shift, dtype):
        """Returns `exp(log_scale - shift)`, of width M or 1: as if values were 1."""
        return ops.cast(ops.exp(self.log_scale - shift), dtype)

    def hidden(self, mask):
        """Returns key features whose hidden rows enter no product and no maximum."""
        if mask is None:
            return self
        values = None if self.values is None else hide(self.values, mask)
        scale = where(ops.expand_dims(mask, -1), self.log_scale, LOWEST)
        return type(self)(values, scale)

    def products(self, other, dtype):
        """Returns the products `(..., R, S)` of the values with those of `other`."""
        rows, columns = ops.cast(self.values, dtype), ops.cast(other.values, dtype)
        return accumulated_matmul(rows, columns, transpose_b=True)


class Squared(Features):
    """Features `v ⊗ v · exp(log_scale)`, whose inner products are squares."""

    # Used by polynomial attention, whose denominator has a 1. The product of a few
    # tokens is `(v · w)²`, which never forms the r² features. `values` is v `(..., r)`.

    has_offset = True
    is_exponential = False
    is_signed = False
    shares_scale = True

    @property
    def width(self):
        """The number of features per token, r²."""
        return self.values.shape[-1] ** 2

    def dense(self):
        """Returns the same features as `Features` of width r²."""
        return Features(self_tensor(self.values), self.log_scale)

    def expand(self, shift, dtype):
        """Returns `v ⊗ v · exp(log_scale - shift)`, as `Features.expand` does."""
        # Each of the two factors gets half the exponent, which scales r numbers instead
        # of r².
        scale = ops.exp((self.log_scale - shift) / 2)
        rows = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(self_tensor(rows), dtype)

    def products(self, other, dtype):
        """Returns the products of the values with those of `other`: `(v · w)²`."""
        return ops.square(super().products(other, dtype))


def self_tensor(x):
    """Returns `x ⊗ x`, all products of two entries: `(..., r)` to `(..., r²)`."""
    products = ops.expand_dims(x, -1) * ops.expand_dims(x, -2)
    return ops.reshape(products, (*ops.shape(x)[:-1], x.shape[-1] ** 2))
