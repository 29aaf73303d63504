"""What feature maps return to the algorithms: `values · exp(log_scale)`.

The exponent is carried along and not applied, so that an algorithm can choose shifts
that cancel between numerator and denominator. Then nothing overflows, and no epsilon is
needed.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_rfattn.backend.precision import (
    accumulated_matmul,
    add_into,
    clip,
    exp_of_difference,
    known_finite,
    where,
    wide_dtype,
)
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

    def compute(self):
        """Returns the features unchanged: unlike `Deferred` ones they are computed."""
        return self

    def dense(self):
        """Returns `Features` with every feature present: the features unchanged."""
        return self

    def ones_or_values(self):
        """Returns the values, or ones if `values` is `None`."""
        return ops.ones_like(self.log_scale) if self.values is None else self.values

    def spread_scale(self):
        """Returns the exponents broadcast to one for each feature."""
        if self.values is None:
            return self.log_scale
        return ops.broadcast_to(self.log_scale, ops.shape(self.values))

    def expand(self, shift, dtype, is_last=False):
        """Returns `values * exp(log_scale - shift)`, rounded once, to `dtype`.

        Args:
            shift: Array that broadcasts to `log_scale`, or `None` for 0.
            dtype: Dtype of the result. The computation is in the dtype of `log_scale`.
            is_last: Whether `log_scale` may be overwritten because nothing else uses
                it.
        """
        scale = exp_of_difference(self.log_scale, shift, is_last)
        if self.values is not None:
            scale = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(scale, dtype)

    def magnitudes(self, shift, dtype):
        """Returns `exp(log_scale - shift)`, of width M or 1: |values| taken as 1."""
        return ops.cast(ops.exp(self.log_scale - shift), dtype)

    def hidden(self, mask):
        """Returns key features whose hidden rows enter no product and no maximum."""
        values = None if self.values is None else hide(self.values, mask)
        return type(self)(values, masked_log_scale(self, mask))

    def products(self, other, dtype):
        """Returns the products `(..., R, S)` of the values with those of `other`."""
        rows, columns = ops.cast(self.values, dtype), ops.cast(other.values, dtype)
        return accumulated_matmul(rows, columns, transpose_b=True)


class Squared(NamedTuple):
    """Features `v ⊗ v · exp(log_scale)`, whose inner products are squares.

    These are the features of polynomial attention, whose denominator has a 1. The
    product of a few tokens is computed as `(v · w)²`, which never forms the r²
    features.

    Attributes:
        values: Array v of shape `(..., r)` with magnitudes at most 1.
        log_scale: Array of shape `(..., 1)`; float32 or float64.
    """

    values: Any
    log_scale: Any

    has_offset = True
    is_exponential = False
    is_signed = False
    shares_scale = True
    num_heads = Features.num_heads
    compute = Features.compute
    hidden = Features.hidden
    magnitudes = Features.magnitudes

    @property
    def width(self):
        """The number of features per token, r²."""
        return self.values.shape[-1] ** 2

    def dense(self):
        """Returns the same features as `Features` of width r²."""
        return Features(self_tensor(self.values), self.log_scale)

    def expand(self, shift, dtype, is_last=False):
        """Returns `v ⊗ v · exp(log_scale - shift)`, as `Features.expand` does."""
        # Each of the two factors gets half the exponent, which scales r numbers instead
        # of r².
        scale = ops.exp((self.log_scale - shift) / 2)
        rows = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(self_tensor(rows), dtype)

    def products(self, other, dtype):
        """Returns the products of the values with those of `other`: `(v · w)²`."""
        return ops.square(Features.products(self, other, dtype))


class Marked(NamedTuple):
    """Features that are all finite, with a mark for tokens that were not.

    A token that is not finite must turn exactly the rows that see it into NaN. Products
    do not give this, because 0 · NaN is NaN. So such a token enters products as a
    finite one, and algorithms add `spoiled` to the outputs that see the token.

    Attributes:
        features: `Features` or `Squared` of shape `(..., M)`.
        spoiled: Array of shape `(..., 1)`: NaN for a token that was not finite, else 0.
    """

    features: Any
    spoiled: Any

    @property
    def num_heads(self):
        """The size of the head axis of the features (the axis before the last)."""
        return self.features.num_heads

    compute = Features.compute


class Deferred(NamedTuple):
    """Features yet to be computed, so that an algorithm need not hold all at once.

    Attributes:
        function: Pure function `(x, parameters) -> Features` (or `Marked`), from shape
            `(..., N, H)` to `(..., N, M)`. It must be hashable: calls with equal
            functions share a compiled program. Its method `heads_first` takes `x` of
            shape `(B, K, R, H)`, in which the query heads of a token are adjacent rows.
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

    def compute(self):
        """Returns the `Features`, or `Marked`."""
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

    def heads_first(self, x, parameters, *choices):
        """Returns what `function.heads_first` gives for the scaled input."""
        return self.function.heads_first(self._scaled(x), parameters, *choices)

    def _scaled(self, x):
        return self.factor * ops.cast(x, wide_dtype(x))


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

    def hidden(self, mask):
        """Returns `Exponents`, heads first, in which hidden keys are at `LOWEST`."""
        if mask is None:
            return self
        common = self.common
        common = ops.zeros_like(self.x[..., :1]) if common is None else common
        return self._replace(common=where(ops.expand_dims(mask, -1), common, LOWEST))

    def compute(self):
        """Returns the `Features` of shape `(B, K, R, M)`, heads first."""
        x, vectors, bias, common = self
        found = accumulated_matmul(x, ops.cast(vectors, x.dtype), is_precise=True)
        found = add_into(found, ops.cast(bias, x.dtype))
        return Features(None, found if common is None else add_into(found, common))


def map_features(function, features):
    """Applies a function of token arrays to all parts of `Features` or `Marked`."""
    if isinstance(features, Exponents):
        common = map_features(function, features.common)
        return features._replace(x=function(features.x), common=common)
    if features is None or not isinstance(features, tuple):
        return None if features is None else function(features)
    return type(features)(*(map_features(function, x) for x in features))


def finite(features):
    """Clips exponents to finite numbers, so that differences are not NaN; NaN stays."""
    log_scale = features.log_scale
    if known_finite(log_scale, limit=-LOWEST):
        return features
    clipped = clip(log_scale, LOWEST, -LOWEST)
    if keras.backend.backend() == "jax":
        # On XLA the maximum of NaN and a number may be the number.
        clipped = ops.where(ops.isnan(log_scale), log_scale, clipped)
    return features._replace(log_scale=clipped)


def masked_log_scale(key, mask):
    """Returns key exponents with hidden keys at `LOWEST`, which no maximum sees."""
    if mask is None:
        return key.log_scale
    return where(ops.expand_dims(mask, -1), key.log_scale, LOWEST)


def self_tensor(x):
    """Returns `x ⊗ x`, all products of two entries: `(..., r)` to `(..., r²)`."""
    products = ops.expand_dims(x, -1) * ops.expand_dims(x, -2)
    return ops.reshape(products, (*ops.shape(x)[:-1], x.shape[-1] ** 2))
