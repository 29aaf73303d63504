"""What feature maps hand to algorithms, and what those hold in between."""

from typing import Any
from typing import NamedTuple

from keras import ops


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

    @property
    def num_heads(self):
        """The length of the axis before the last."""
        return self.log_scale.shape[-2]

    @property
    def is_signed(self):
        """Whether a sum of products may cancel."""
        return self.values is not None

    @property
    def width(self):
        """How many features there are."""
        return (self.log_scale if self.values is None else self.values).shape[-1]

    @property
    def has_offset(self):
        """Whether attention over them has a 1 in its denominator."""
        return False


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

    @property
    def num_heads(self):
        """The length of the axis before the last."""
        return self.log_scale.shape[-2]

    @property
    def is_signed(self):
        """Whether a sum of products may cancel."""
        return False

    @property
    def width(self):
        """How many features there are."""
        return self.values.shape[-1] ** 2

    @property
    def has_offset(self):
        """Whether attention over them has a 1 in its denominator."""
        return True

    def expanded(self):
        """The same as `Features`, of width r²."""
        return Features(self_tensor(self.values), self.log_scale)


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


class Deferred(NamedTuple):
    """Features yet to be computed, so that an algorithm need not hold all at once.

    Attributes:
        function: Pure `(x, parameters) -> Features` (or `Marked`), `(..., N, H) ->
            (..., N, M)`; hashable, as calls whose functions are equal share a program.
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


class Sums(NamedTuple):
    """Keys and values summed per feature, relative to `maximum` (see `summarize`)."""

    maximum: Any  # (..., M or 1)
    numerator: Any  # (..., M, V)
    normalizer: Any  # (..., M)
    magnitude: Any  # (..., M or 1): the normalizer with every |value| taken as 1
    spoiled: Any  # (...): NaN if a key or value was not finite, else 0


class Reading(NamedTuple):
    """What queries see of some keys, times `exp(-shift)`; `bound >= |denominator|`."""

    shift: Any  # (..., R)
    numerator: Any  # (..., R, V)
    denominator: Any  # (..., R)
    bound: Any  # (..., R)


def self_tensor(x):
    """`x ⊗ x`: every product of two, `(..., r)` to `(..., r²)`."""
    products = x[..., :, None] * x[..., None, :]
    return ops.reshape(products, (*ops.shape(x)[:-1], x.shape[-1] ** 2))
