"""What feature maps hand to algorithms: `values · exp(log_scale)`.

The exponent is carried, never applied, so that an algorithm can choose shifts that
cancel between numerator and denominator; nothing overflows, and no epsilon is needed.
"""

from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_rfattn.ops.masks import hide
from keras_rfattn.ops.precision import accumulated_matmul
from keras_rfattn.ops.precision import add_into
from keras_rfattn.ops.precision import clip
from keras_rfattn.ops.precision import exp_of_difference
from keras_rfattn.ops.precision import known_finite
from keras_rfattn.ops.precision import where
from keras_rfattn.ops.precision import wide_dtype

# Stands for -inf in exponents. Finite, so that a difference of two is 0, not NaN.
LOWEST = -1e30


class Features(NamedTuple):
    """Random features of queries or of keys: `values * exp(log_scale)`.

    Attributes:
        values: Array of shape `(..., M)` with magnitudes at most 1, or `None`
            where every value is 1 (positive maps, which carry all in the exponent).
        log_scale: Array of shape `(..., M)`, or `(..., 1)` where all features of
            a token share it; float32 or float64.
    """

    values: Any
    log_scale: Any

    # Whether attention over them has a 1 in its denominator.
    has_offset = False

    @property
    def num_heads(self):
        """The length of the axis before the last."""
        return self.log_scale.shape[-2]

    @property
    def is_exponential(self):
        """Whether the exponents say all."""
        return self.values is None

    @property
    def is_signed(self):
        """Whether a sum of products may cancel."""
        return not self.is_exponential

    @property
    def width(self):
        """How many features there are."""
        return (self.log_scale if self.values is None else self.values).shape[-1]

    @property
    def shares_scale(self):
        """Whether all features of a token have one exponent."""
        return self.values is not None and self.log_scale.shape[-1] == 1

    def compute(self):
        """Themselves: nothing is deferred."""
        return self

    def dense(self):
        """`Features` one by one: themselves."""
        return self

    def ones_or_values(self):
        """Values, ones where they are left out."""
        return ops.ones_like(self.log_scale) if self.values is None else self.values

    def spread_scale(self):
        """Exponents, one for each feature."""
        if self.values is None:
            return self.log_scale
        return ops.broadcast_to(self.log_scale, ops.shape(self.values))

    def expand(self, shift, dtype, is_last=False):
        """`values * exp(log_scale - shift)`, computed wide, rounded once to `dtype`.

        Args:
            shift: Array that broadcasts to `log_scale`, or `None` for 0.
            dtype: Of the result.
            is_last: Whether nothing else holds `log_scale`, which may be overwritten.
        """
        scale = exp_of_difference(self.log_scale, shift, is_last)
        if self.values is not None:
            scale = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(scale, dtype)

    def magnitudes(self, shift, dtype):
        """`exp(log_scale - shift)`: every |value| taken as 1; of width M or 1."""
        return ops.cast(ops.exp(self.log_scale - shift), dtype)

    def hidden(self, mask):
        """Keys whose hidden rows are in no product and no maximum."""
        values = None if self.values is None else hide(self.values, mask)
        return type(self)(values, masked_log_scale(self, mask))

    def products(self, other, dtype):
        """Products `(..., R, S)` of the values alone with those of `other`."""
        rows, columns = ops.cast(self.values, dtype), ops.cast(other.values, dtype)
        return accumulated_matmul(rows, columns, transpose_b=True)


class Squared(NamedTuple):
    """Features `v ⊗ v · exp(log_scale)`: every product of two is a square.

    They are the features of polynomial attention, whose denominator has a 1. Products
    of a few tokens are taken as `(v · w)²`, which never forms the r² features.

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
        """How many features there are."""
        return self.values.shape[-1] ** 2

    def dense(self):
        """The same as `Features`, of width r²."""
        return Features(self_tensor(self.values), self.log_scale)

    def expand(self, shift, dtype, is_last=False):
        """As of `Features`, of width r²."""
        # Half the exponent for each factor: r numbers are scaled, not r².
        scale = ops.exp((self.log_scale - shift) / 2)
        rows = scale * ops.cast(self.values, scale.dtype)
        return ops.cast(self_tensor(rows), dtype)

    def products(self, other, dtype):
        """As of `Features`."""
        return ops.square(Features.products(self, other, dtype))


class Marked(NamedTuple):
    """Features all of which are finite, and which tokens were not.

    What is not finite must reach the rows that see it and no other, but 0 · NaN is
    NaN. So such a token enters products as some finite one, and algorithms add its
    mark to what sees it.

    Attributes:
        features: `Features` or `Squared` of shape `(..., M)`.
        spoiled: Array of shape `(..., 1)`: NaN for a token that was not finite, else
            0.
    """

    features: Any
    spoiled: Any

    @property
    def num_heads(self):
        """The length of the axis before the last of the features."""
        return self.features.num_heads

    compute = Features.compute


class Deferred(NamedTuple):
    """Features yet to be computed, so that an algorithm need not hold all at once.

    Attributes:
        function: Pure `(x, parameters) -> Features` (or `Marked`), `(..., N, H) ->
            (..., N, M)`; hashable, as calls whose functions are equal share a program.
            Its method `heads_first` takes `(B, K, R, H)`, groups beside their token.
        x: Array of shape `(..., N, H)`.
        parameters: Pytree of arrays.
    """

    function: Any
    x: Any
    parameters: Any

    @property
    def num_heads(self):
        """The length of the axis before the last."""
        return self.x.shape[-2]

    def compute(self):
        """The `Features`, or `Marked`."""
        return self.function(self.x, self.parameters)


class Scaled(NamedTuple):
    """A function of `Deferred` that widens and scales what it is given first.

    Attributes:
        function: As of `Deferred`.
        factor: A number.
    """

    function: Any
    factor: float

    def __call__(self, x, parameters):
        return self.function(self._scaled(x), parameters)

    def heads_first(self, x, parameters, *choices):
        """As of the function."""
        return self.function.heads_first(self._scaled(x), parameters, *choices)

    def _scaled(self, x):
        return self.factor * ops.cast(x, wide_dtype(x))


class Exponents(NamedTuple):
    """Exponential features before they are computed: `x · vectors + bias + common`.

    Attributes:
        x: Array of shape `(B, ..., N, H)`, or `(B, K, R, H)` heads first.
        vectors: `(B or 1, K, H, M)`, for each group of N / K heads.
        bias: `(B or 1, K, 1, M)`.
        common: `(..., 1)`, what the exponents of a token share, or `None`.
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
        """How many features there are."""
        return self.vectors.shape[-1]

    def hidden(self, mask):
        """As of `Features`, heads first."""
        if mask is None:
            return self
        common = self.common
        common = ops.zeros_like(self.x[..., :1]) if common is None else common
        return self._replace(common=where(ops.expand_dims(mask, -1), common, LOWEST))

    def compute(self):
        """The `Features` `(B, K, R, M)`, heads first."""
        x, vectors, bias, common = self
        found = accumulated_matmul(x, ops.cast(vectors, x.dtype), is_precise=True)
        found = add_into(found, ops.cast(bias, x.dtype))
        return Features(None, found if common is None else add_into(found, common))


def map_features(function, features):
    """Applies a function of tokens to all parts of `Features` or `Marked`."""
    if isinstance(features, Exponents):
        common = map_features(function, features.common)
        return features._replace(x=function(features.x), common=common)
    if features is None or not isinstance(features, tuple):
        return None if features is None else function(features)
    return type(features)(*(map_features(function, x) for x in features))


def finite(features):
    """Clips exponents to finite numbers, whose differences are no NaN; NaN stays."""
    log_scale = features.log_scale
    if known_finite(log_scale, limit=-LOWEST):
        return features
    clipped = clip(log_scale, LOWEST, -LOWEST)
    if keras.backend.backend() == "jax":
        # XLA may take the larger of NaN and a number to be the number.
        clipped = ops.where(ops.isnan(log_scale), log_scale, clipped)
    return features._replace(log_scale=clipped)


def masked_log_scale(key, mask):
    """Key exponents with hidden keys at `LOWEST`, so that no maximum sees them."""
    if mask is None:
        return key.log_scale
    return where(ops.expand_dims(mask, -1), key.log_scale, LOWEST)


def self_tensor(x):
    """`x ⊗ x`: every product of two, `(..., r)` to `(..., r²)`."""
    products = ops.expand_dims(x, -1) * ops.expand_dims(x, -2)
    return ops.reshape(products, (*ops.shape(x)[:-1], x.shape[-1] ** 2))
