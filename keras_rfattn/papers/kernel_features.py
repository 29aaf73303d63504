"""A layer that computes random features of a kernel, for use outside attention."""

import math

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.arguments import is_positive
from keras_rfattn.feature_maps.base import half_square
from keras_rfattn.feature_maps.weights import fix_name

KERNELS = ("gaussian", "softmax")


@keras.saving.register_keras_serializable("keras_rfattn")
class KernelFeatures(keras.layers.Layer):
    """Random features φ with `φ(x) · φ(y) ≈ k(x, y)`, for kernel machines.

    A linear model on the output is a kernel machine whose cost is linear in the number
    of examples.

    Args:
        feature_map: A map of the softmax kernel, its registered name or its config.
            Defaults to `"favor"` (random Fourier features).
        kernel: `"gaussian"` (default) for `exp(-gamma ‖x - y‖²)`, or `"softmax"` for
            `exp(2 gamma x · y)`, which is the Gaussian kernel times
            `exp(gamma (‖x‖² + ‖y‖²))`.
        gamma: Positive number, 0.5 by default.
        num_features: Number of random vectors of a map given by name. If `None`, the
            map's default.
        seed: Seed of a map given by name, a non-negative integer. If `None`, it is
            drawn from Keras' global seed generator.

    Call arguments:
        inputs: Array of shape `(..., H)`.
        side: `"query"` (default) for x or `"key"` for y. The two differ only for maps
            that are not symmetric (`is_symmetric`).

    Returns:
        Array of shape `(..., M)`, for M features. Features of the softmax kernel can
        overflow where the kernel itself does.

    Raises:
        ValueError: If the map estimates another kernel, or `gamma` is not positive.

    Reference:
        Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (2007).

    Examples:
        >>> layer = keras_rfattn.papers.KernelFeatures(num_features=2000, seed=0)
        >>> features = layer(np.array([[0.0, 0.0], [1.0, 0.0]], "float32"))
        >>> kernel = float(keras.ops.sum(features[0] * features[1]))
        >>> bool(abs(kernel - np.exp(-0.5)) < 0.05)
        True
    """

    def __init__(
        self,
        feature_map="favor",
        kernel="gaussian",
        gamma=0.5,
        num_features=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        arguments = {"num_features": num_features, "seed": seed}
        feature_map = feature_maps.get(feature_map, **arguments)
        is_softmax = feature_map.kernel == "softmax"
        if kernel not in KERNELS or not is_positive(gamma) or not is_softmax:
            raise ValueError(
                f"`kernel` must be one of {KERNELS}, `gamma` must be positive, and "
                "`feature_map` must estimate the softmax kernel. Received: "
                f"kernel={kernel!r}, gamma={gamma!r}, feature_map={feature_map!r} with "
                f"kernel {feature_map.kernel!r}."
            )
        fix_name(feature_map, "feature_map")
        self.feature_map, self.kernel, self.gamma = feature_map, kernel, gamma

    def build(self, input_shape):
        """Draws the random vectors for inputs of shape `(..., H)`."""
        if not input_shape or input_shape[-1] is None:
            raise ValueError(
                "`inputs` must have shape (..., H) with a known H. Received: shape "
                f"{tuple(input_shape)}."
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=1, axes={-1: input_shape[-1]})
        if not self.feature_map.built:
            self.feature_map.build((None, None, 1, input_shape[-1]))

    def adapt(self, x, y=None):
        """Adapts the map to data, if it is adaptive. Builds the layer in any case.

        Args:
            x: Array of shape `(n, H)`, n inputs of the query side.
            y: Array of shape `(n, H)`, inputs of the key side. Defaults to `x`.

        Raises:
            ValueError: If the map was trained, or it cannot adapt to the data. The map
                is then unchanged.
        """
        x = self._rows("x", x)
        y = x if y is None else self._rows("y", y)
        self.build(x.shape)
        if self.feature_map.is_adaptive:
            self.feature_map.adapt([(x[None], y[None])])

    def _rows(self, name, x):
        rows = np.asarray(x)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.number):
            raise ValueError(
                f"`{name}` must be an array of numbers of shape (n, H). Received: "
                f"{name}={x!r:.80} of shape {rows.shape}."
            )
        return rows.astype("float64") * math.sqrt(2 * self.gamma)

    def call(self, inputs, side="query"):
        if side not in ("query", "key"):
            raise ValueError(f"`side` must be 'query' or 'key'. Received: side={side}.")
        shape = ops.shape(inputs)
        x = ops.reshape(inputs, (1, -1, 1, shape[-1])) * math.sqrt(2 * self.gamma)
        if side == "query":
            features = self.feature_map.query_features(x).dense()
        else:
            features = self.feature_map.key_features(x).dense()
        log_scale = features.log_scale
        if self.kernel == "gaussian":
            log_scale = log_scale - half_square(ops.cast(x, log_scale.dtype))
        values = features.ones_or_values() * ops.exp(log_scale)
        return ops.reshape(values, (*shape[:-1], self.feature_map.output_dim))

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.feature_map.output_dim)

    def get_config(self):
        return {
            **super().get_config(),
            "feature_map": feature_maps.serialize(self.feature_map),
            "kernel": self.kernel,
            "gamma": self.gamma,
        }
