"""A hybrid's coefficient that is largest where x is near a linear function of y."""

import keras
import numpy as np
from keras import ops

import keras_rfattn.feature_maps.registry as registry
from keras_rfattn.backend import precise_einsum, wide_dtype
from keras_rfattn.feature_maps.adaptive import Adaptive
from keras_rfattn.feature_maps.base import Bound, FeatureMap, half_square
from keras_rfattn.papers.algebra import scale
from keras_rfattn.papers.coefficients import Coefficient


def of_inner(name):
    """Returns a property of `KernelCoefficient` whose value the inner map has."""
    # `torch.compile` cannot trace an `operator.attrgetter`.
    return property(lambda self: getattr(self.inner, name))


@keras.saving.register_keras_serializable("keras_rfattn")
class KernelCoefficient(Coefficient, Adaptive, FeatureMap):
    """The coefficient `λ = constant + factor · exp(-‖x + M y‖² / (2 c²))`.

    The matrix M and the width c are arbitrary. The Gaussian equals the softmax kernel
    of `x / c` and `-M y / c`, times `exp(-‖x‖²/2c²) exp(-‖M y‖²/2c²)`. Any softmax map
    can therefore estimate it. By default M is -I, so that the Gaussian is largest where
    x is near y. The estimate of λ then has no variance for equal inputs if the map is
    trigonometric, for opposite inputs if the map is positive, and for both if the map
    is a hybrid of these two.

    Args:
        feature_map: A map of the softmax kernel, its registered name or its config.
            Defaults to `"favorplus"`.
        matrix: M, an array of shape `(H, H)` for all heads, or `(K, H, H)` for K heads
            of dim H. -I if `None`.
        width: Width c > 0 of the Gaussian. Defaults to 1.
        constant: Number that is added to the Gaussian. Defaults to 0.
        factor: Factor of the Gaussian, not 0. Defaults to 1.
        seed: Seed of the inner map. If `None`, the inner map keeps its own.

    Raises:
        ValueError: If the map estimates another kernel than softmax, `width` is not
            positive, `factor` is 0, or `matrix` has another shape.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equation 20, section F.

    Examples:
        >>> from keras_rfattn import papers
        >>> coefficient = papers.KernelCoefficient("favor", width=2.0)
        >>> coefficient.build((None, None, 2, 8))
        >>> features = coefficient.key_features(np.ones((1, 10, 2, 8), "float32"))
        >>> tuple(features.values.shape)
        (1, 10, 2, 32)
    """

    is_adaptive = of_inner("is_adaptive")
    measures_sequence = of_inner("measures_sequence")
    is_unbiased = of_inner("is_unbiased")
    assumes_equal_lengths = of_inner("assumes_equal_lengths")
    num_features = of_inner("num_features")
    output_dim = of_inner("output_dim")
    features_per_scale = of_inner("features_per_scale")

    def __init__(
        self, feature_map="favorplus", matrix=None, width=1.0, constant=0.0,
        factor=1.0, seed=None, **kwargs,
    ):  # fmt: skip
        inner = registry.get(feature_map)
        if inner.kernel != "softmax":
            raise ValueError(
                "`feature_map` must estimate softmax attention. Received: "
                f"feature_map={feature_map!r} with kernel {inner.kernel!r}."
            )
        super().__init__(seed=inner.seed if seed is None else seed, **kwargs)
        self.inner = inner.reseeded(self.seed)
        if not width > 0 or factor == 0:
            raise ValueError(
                "`width` must be positive, and `factor` must not be 0. Received: "
                f"width={width}, factor={factor}."
            )
        if matrix is not None:
            matrix = np.asarray(matrix, "float32")
            if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
                raise ValueError(
                    "`matrix` must have shape (H, H) or (K, H, H). Received: "
                    f"matrix.shape={matrix.shape}."
                )
        self.matrix, self.width = matrix, width
        self.constant, self.factor = constant, factor

    def build(self, input_shape):
        super().build(input_shape)
        self.inner.build(input_shape)
        shape = self.num_heads, self.head_dim, self.head_dim
        found = -np.eye(self.head_dim) if self.matrix is None else self.matrix
        if found.shape not in (shape, shape[1:]):
            raise ValueError(
                f"`matrix` must have shape {shape[1:]} or {shape} here. Received: "
                f"matrix.shape={found.shape}."
            )
        self.weight = self.add_fixed("matrix", np.broadcast_to(found, shape))

    def fit(self, samples):
        matrix = ops.convert_to_numpy(self.weight)
        samples = [
            (q / self.width, -k @ matrix.swapaxes(-1, -2) / self.width)
            for q, k in samples
        ]
        self.inner.adapt(samples)

    def draw_again(self):
        self.inner.draw_again()

    def bind(self, query, key, side=1.0, query_mask=None, key_mask=None, causal=False):
        query, key = self.placed_query(query), self.placed_key(key)
        inner = self.inner.bind(query, key, side, query_mask, key_mask, causal)
        return BoundCoefficient(self, side, inner)

    def query_features(self, x):
        return self.bind(x, x, causal=True).query_features(x)

    def key_features(self, x):
        return self.bind(x, x, causal=True).key_features(x)

    def placed_query(self, x):
        """Returns `x / c`."""
        return ops.cast(x, wide_dtype(x)) / self.width

    def placed_key(self, x):
        """Returns `-M x / c`."""
        x = ops.cast(x, wide_dtype(x)) / self.width
        return -precise_einsum("...nh,nih->...ni", x, self.per_head(self.weight, x))

    def get_config(self):
        matrix = self.matrix if self.matrix is None else self.matrix.tolist()
        return {
            **super().get_config(),
            "feature_map": registry.serialize(self.inner),
            "matrix": matrix,
            "width": self.width,
            "constant": self.constant,
            "factor": self.factor,
        }


class BoundCoefficient(Bound):
    """A `KernelCoefficient` whose inner map is bound to a call."""

    def __init__(self, coefficient, side, inner):
        super().__init__(coefficient, side)
        self.inner = inner

    def query_features(self, x):
        x = self.placed_query(x)
        return scale(self._gaussian(self.inner.query_features(x), x), self.factor)

    def key_features(self, x):
        x = self.placed_key(x)
        return self._gaussian(self.inner.key_features(x), x)

    def _gaussian(self, features, x):
        features = features.dense()
        factor = half_square(self.side * x)
        return features._replace(log_scale=features.log_scale - factor)
