"""The kernel `(q · k)^p`, and its learned sketch ("polysketch_learned").

The sum in the denominator is over all keys that the query sees, and the 1 is part of
the definition. Queries and keys first pass through a layer normalization each, which
all heads share, so that `q · k` is `√head_dim` times their cosine. The paper
("PolySketchFormer", Kacham et al., 2024, section 2.1) has one normalization for both,
and does not divide the product by `√head_dim`.
"""

import math

import keras
from keras import ops

from keras_rfattn.arguments import check_sizes, derive_seed, is_integer
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import Polynomial, unit

DEFAULT_DEGREE = 4
DEFAULT_SKETCH_SIZE = 32


class PolynomialFeatureMap(FeatureMap):
    """Base class for polynomial attention, with weights `(q·k)^p / (1 + Σ (q·k)^p)`."""

    kernel = "polynomial"
    is_positive = False
    is_preparing = True
    features_per_scale = 1

    def __init__(self, degree=DEFAULT_DEGREE, **kwargs):
        super().__init__(**kwargs)
        if not is_integer(degree) or degree < 2 or degree % 2:
            raise ValueError(
                "`degree` must be a positive even integer. "
                f"Received: degree={degree!r}."
            )
        self.degree = degree
        self.query_norm = keras.layers.LayerNormalization(dtype="float32")
        self.key_norm = keras.layers.LayerNormalization(dtype="float32")

    @property
    def exact_kernel(self):
        return Polynomial(self.degree)

    def build(self, input_shape):
        super().build(input_shape)
        for norm in (self.query_norm, self.key_norm):
            norm.build((None, self.head_dim))

    def prepare(self, query, key):
        """Applies the layer normalizations to queries and keys, in float32."""
        return self.query_norm(query), self.key_norm(key)

    def get_config(self):
        return {**super().get_config(), "degree": self.degree}


class Sketch(PolynomialFeatureMap):
    """Base of sketches `φ(x) = S(x) ⊗ S(x)`, `S(x) · S(y)` near `(x · y)^{p/2}`."""

    # A sketch for half the degree is computed twice, both results are transformed and
    # multiplied entry by entry (algorithms 1 and 2), down to degree 1, which is x.

    is_unbiased = False

    def __init__(self, degree=DEFAULT_DEGREE, **kwargs):
        super().__init__(degree, **kwargs)
        if degree & (degree - 1):
            raise ValueError(
                "`degree` of a sketch must be a power of 2, at least 2. Received: "
                f"degree={degree}."
            )

    @property
    def output_dim(self):
        return (self.head_dim if self.degree == 2 else self.num_features) ** 2

    def levels(self):
        """Returns the number of transformations of each level: p/2, p/4, ... 2."""
        return [2**i for i in range(self.degree.bit_length() - 2, 0, -1)]


@keras.saving.register_keras_serializable("keras_rfattn")
class PolySketchLearned(Sketch):
    """Learned polynomial sketch, non-negative (algorithm 2).

    Each transformation is a small network, and `√r tanh(· / √r)` is applied to each
    product. There are p - 2 networks of about `8 h r + 24 r²` parameters, where h is
    the size of their input; all heads share them. Their initial weights are random, so
    that a model needs training after its attention is replaced.

    Args:
        num_features: Sketch size r, 32 by default. Features have width r².
        degree: Degree p of the kernel, a power of 2 that is at least 2. Defaults to 4.
        seed: Seed of the networks, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), section 2.3, appendix D, algorithm 2.
    """

    def __init__(
        self, num_features=DEFAULT_SKETCH_SIZE, degree=DEFAULT_DEGREE, **kwargs
    ):
        super().__init__(degree, **kwargs)
        check_sizes(num_features=num_features)
        self.num_features = num_features
        self.networks = [
            [
                SketchNetwork(num_features, derive_seed(self.seed, i, j))
                for j in range(c)
            ]
            for i, c in enumerate(self.levels())
        ]

    def build(self, input_shape):
        super().build(input_shape)
        dim = self.head_dim
        for level in self.networks:
            for network in level:
                network.build((None, dim))
            dim = self.num_features

    def key_features(self, x):
        x, log_norm = unit(x)
        if not self.networks:
            return Squared(x, self.degree * log_norm)
        root = math.sqrt(self.num_features)
        sketches = [math.sqrt(self.head_dim) * x] * len(self.networks[0])
        for level in self.networks:
            sketches = [f(s) for f, s in zip(level, sketches, strict=True)]
            pairs = zip(sketches[0::2], sketches[1::2], strict=True)
            sketches = [root * ops.tanh(a * b / root) for a, b in pairs]
        values = ops.cast(sketches[0] / root, x.dtype)
        return Squared(values, math.log(self.num_features) + ops.zeros_like(log_norm))

    def get_config(self):
        return {**super().get_config(), "num_features": self.num_features}


class SketchNetwork(keras.layers.Layer):
    """Two blocks of a layer normalization and dense layers of 8r and r units."""

    def __init__(self, size, seed):
        super().__init__(dtype="float32")
        self.steps = []
        for i, (units, activation) in enumerate([(8 * size, "gelu"), (size, None)] * 2):
            if i % 2 == 0:
                self.steps.append(keras.layers.LayerNormalization(dtype="float32"))
            initializer = keras.initializers.GlorotUniform(derive_seed(seed, i))
            self.steps.append(
                keras.layers.Dense(
                    units, activation, kernel_initializer=initializer, dtype="float32"
                )
            )

    def build(self, input_shape):
        for step in self.steps:
            step.build(input_shape)
            input_shape = step.compute_output_shape(input_shape)

    def call(self, x):
        """Transforms x: `(..., H) -> (..., r)`."""
        for step in self.steps:
            x = step(x)
        return x
