"""A hybrid's coefficient that is largest where x is near a linear function of y."""

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import precise_einsum, wide_dtype
from keras_rfattn.feature_maps.base import Sided, half_square
from keras_rfattn.feature_maps.conditioned import MapOfMap, of_inner
from keras_rfattn.papers.algebra import scale
from keras_rfattn.papers.coefficients import Coefficient


@keras.saving.register_keras_serializable("keras_rfattn")
class KernelCoefficient(Sided, Coefficient, MapOfMap):
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
        super().__init__(feature_map, seed, **kwargs)
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

    is_adaptive = of_inner("is_adaptive")

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

    def statistics(self, query, key, *args, **kwargs):
        return self.inner.statistics(
            self._placed(query, False), self._placed(key, True), *args, **kwargs
        )

    def _features(self, x, stats, is_key):
        inner = self.inner.key_features if is_key else self.inner.query_features
        x = self._placed(x, is_key)
        features = inner(x, stats)
        features = features._replace(log_scale=features.log_scale - half_square(x))
        return features if is_key else scale(features, self.factor)

    def _placed(self, x, is_key):
        """Returns `x / c` for queries and `-M x / c` for keys."""
        x = ops.cast(x, wide_dtype(x)) / self.width
        if is_key:
            x = -precise_einsum("...nh,nih->...ni", x, self.per_head(self.weight, x))
        return x

    def get_config(self):
        matrix = self.matrix if self.matrix is None else self.matrix.tolist()
        return {
            **super().get_config(),
            "matrix": matrix,
            "width": self.width,
            "constant": self.constant,
            "factor": self.factor,
        }
