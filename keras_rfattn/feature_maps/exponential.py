"""Mixin of maps whose features are pure exponentials of products."""

from keras import ops

from keras_rfattn.backend import precise_einsum
from keras_rfattn.feature_maps.base import Sided
from keras_rfattn.ops.features import Features


class Exponential(Sided):
    """Mixin of maps that implement only `exponents` and `common_exponent`.

    The mixin must come before `FeatureMap` or `ProjectedFeatureMap` in the bases. Some
    algorithms use the two methods to compute features where and when they need them.
    For all other algorithms, this class computes the features from the two methods. A
    subclass that overrides `query_features` or `key_features` must override `exponents`
    too. Otherwise `has_exponents` becomes `False`, and every algorithm calls the
    overridden feature methods.
    """

    has_exponents = True

    def _features(self, x, stats, is_key):
        method = "key_features" if is_key else "query_features"
        own, vectors, bias, _ = self.exponents(method, x, stats)
        shape, groups = ops.shape(x), x.shape[-2] // self.num_heads
        lead = tuple(shape[:-2])
        own = ops.reshape(own, (*lead, self.num_heads, groups, self.head_dim))
        if vectors.shape[0] == 1:
            products = precise_einsum("...kgh,khm->...kgm", own, vectors[0])
        else:
            products = precise_einsum("b...kgh,bkhm->b...kgm", own, vectors)
        middle = (1,) * (len(lead) - 1)
        products = products + ops.reshape(
            bias, (-1, *middle, self.num_heads, 1, self.output_dim)
        )
        products = products + self.common_exponent(method, own, stats)
        return Features(None, ops.reshape(products, (*shape[:-1], self.output_dim)))
