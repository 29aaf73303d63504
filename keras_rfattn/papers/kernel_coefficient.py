"""A hybrid's coefficient that is largest where x is near a linear function of y."""

import keras
import numpy as np
from keras import ops

import keras_rfattn.feature_maps.registry as registry
from keras_rfattn.backend import precise_einsum, wide_dtype
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.papers.algebra import scale
from keras_rfattn.papers.coefficients import Coefficient
from keras_rfattn.papers.map_of_maps import MapOfMaps


@keras.saving.register_keras_serializable("keras_rfattn")
class KernelCoefficient(Coefficient, MapOfMaps):
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

    @property
    def output_dim(self):
        return self.inner.output_dim

    def parts(self):
        return [self.inner]

    def build(self, input_shape):
        super().build(input_shape)
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

    def bind(self, query, key, *args, **kwargs):
        query = ops.cast(query, wide_dtype(query)) / self.width
        return super().bind(query, self._moved(key), *args, **kwargs)

    def queries(self, parts, x):
        x = x / self.width
        return scale(_of_gaussian(parts[0].query_features(x), x), self.factor)

    def keys(self, parts, x):
        x = self._moved(x)
        return _of_gaussian(parts[0].key_features(x), x)

    def _moved(self, key):
        """Returns `-M k / c` for keys k."""
        x = ops.cast(key, wide_dtype(key)) / self.width
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


def _of_gaussian(features, x):
    """Returns features of the Gaussian kernel of x, from those of softmax."""
    features = features.dense()
    return features._replace(log_scale=features.log_scale - half_square(x))
