"""Random features as a scikit-learn transformer, similar to `RBFSampler`.

This module needs scikit-learn, which `import keras_rfattn` does not import.
"""

import numpy as np
from keras import ops
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from keras_rfattn import feature_maps
from keras_rfattn.arguments import is_positive
from keras_rfattn.papers.kernel_features import KernelFeatures

BLOCK = 1024


def _gamma(gamma, X):
    """Returns the value of `gamma` for the data X."""
    if isinstance(gamma, str) and gamma in ("scale", "auto"):
        variance = float(X.var()) if gamma == "scale" else 1.0
        return 1 / (X.shape[1] * (variance or 1.0))
    if not is_positive(gamma):
        raise ValueError(
            "`gamma` must be a positive number, 'scale' or 'auto'. "
            f"Received: gamma={gamma!r}."
        )
    return gamma


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Transformer that approximates a kernel's feature space by random features.

    Args:
        feature_map: A registered name, a `keras_rfattn.feature_maps.FeatureMap` or its
            config. The map must estimate the softmax kernel, with the same features
            for queries and keys. If it has parameters that are measured on data, `fit`
            sets them. Defaults to `"favor"`.
        kernel: `"gaussian"` (default) for `exp(-gamma ‖x - y‖²)`, or `"softmax"` for
            `exp(2 gamma x · y)`.
        gamma: Positive number, 0.5 by default. As elsewhere in scikit-learn, `"scale"`
            means `1 / (n_features · X.var())` and `"auto"` means `1 / n_features`.
        num_features: Number of random vectors of a map given by name, 100 by default.
        random_state: Seed of the random vectors of a map given by name: an integer,
            a `RandomState` or `None`.

    Attributes:
        layer_: The fitted `keras_rfattn.KernelFeatures`.
        n_features_in_: Number of columns seen by `fit`.

    Raises:
        ValueError: In `fit`, if the map estimates another kernel than softmax or has
            different features for queries and for keys, or `kernel` or `gamma` is
            invalid.

    Reference:
        Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (2007).

    Examples:
        >>> from keras_rfattn.papers.sklearn import RandomFeatures
        >>> transformer = RandomFeatures(gamma=0.5, num_features=50, random_state=0)
        >>> transformer.fit_transform(np.ones((3, 2))).shape
        (3, 100)
    """

    def __init__(
        self, feature_map="favor", kernel="gaussian", gamma=0.5, num_features=100,
        random_state=None,
    ):  # fmt: skip
        self.feature_map = feature_map
        self.kernel = kernel
        self.gamma = gamma
        self.num_features = num_features
        self.random_state = random_state

    def fit(self, X, y=None):
        """Draws the random vectors, and adapts the map to X if it is adaptive.

        Args:
            X: Array of shape `(n, H)`, for n examples of H columns.
            y: Ignored.

        Returns:
            The transformer itself.

        Raises:
            ValueError: If the map has different features for queries and for keys, or
                `gamma` is invalid.
        """
        X = validate_data(self, X, dtype=("float64", "float32"))
        feature_map = self.feature_map
        if isinstance(feature_map, str):
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            feature_map = feature_maps.resolve(feature_map, self.num_features, seed)
        else:
            # A copy, so that the caller's map does not change.
            feature_map = feature_maps.get(feature_map)
            feature_map = feature_map.reseeded(feature_map.seed)
        if not feature_map.is_symmetric:
            raise ValueError(
                "`feature_map` must have the same features for queries and keys. "
                f"Received: feature_map={self.feature_map!r}. Use "
                "`keras_rfattn.KernelFeatures` with `side=`."
            )
        gamma = _gamma(self.gamma, X)
        self.layer_ = KernelFeatures(feature_map, self.kernel, gamma)
        self.layer_.adapt(X)
        self._n_features_out = feature_map.output_dim
        return self

    def transform(self, X):
        """Computes random features of X.

        Args:
            X: Array of shape `(n, H)`, for n examples of H columns.

        Returns:
            Array of shape `(n, M)` with the dtype of X, for M features.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=("float64", "float32"), reset=False)
        # All blocks have the same length, so that the features of a row do not depend
        # on the number of rows.
        padded = np.zeros((-(-len(X) // BLOCK) * BLOCK, X.shape[1]), "float32")
        padded[: len(X)] = X
        blocks = [
            ops.convert_to_numpy(self.layer_(padded[i : i + BLOCK]))
            for i in range(0, len(padded), BLOCK)
        ]
        return np.concatenate(blocks)[: len(X)].astype(X.dtype)

    def __getstate__(self):
        state = dict(super().__getstate__())
        layer = state.pop("layer_", None)
        if layer is not None:
            state["_layer_config"] = layer.get_config()
            state["_layer_weights"] = [np.asarray(w) for w in layer.get_weights()]
        return state

    def __setstate__(self, state):
        state = dict(state)
        config = state.pop("_layer_config", None)
        weights = state.pop("_layer_weights", None)
        super().__setstate__(state)
        if config is not None:
            self.layer_ = KernelFeatures.from_config(config)
            self.layer_.build((None, self.n_features_in_))
            self.layer_.set_weights(weights)
