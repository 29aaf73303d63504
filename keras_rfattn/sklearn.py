"""Random features as a scikit-learn transformer, beside `RBFSampler`.

Needs scikit-learn, which `import keras_rfattn` alone does not load.
"""

import numbers

import numpy as np
from keras import ops
from sklearn.base import BaseEstimator
from sklearn.base import ClassNamePrefixFeaturesOutMixin
from sklearn.base import TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from sklearn.utils.validation import validate_data

from keras_rfattn import feature_maps
from keras_rfattn import layers

BLOCK = 1024


def _gamma(gamma, X):
    """The number that `gamma` means for X."""
    if isinstance(gamma, str) and gamma in ("scale", "auto"):
        variance = float(X.var()) if gamma == "scale" else 1.0
        return 1 / (X.shape[1] * (variance or 1.0))
    if isinstance(gamma, bool) or not isinstance(gamma, numbers.Real) or not gamma > 0:
        raise ValueError(
            "`gamma` must be a positive number, 'scale' or 'auto'. "
            f"Received: gamma={gamma!r}."
        )
    return gamma


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Approximates a kernel's feature space by random features.

    Args:
        feature_map: Name, `keras_rfattn.feature_maps.FeatureMap` or config of a
            symmetric estimator of the softmax kernel. Parameters learnt from data are
            measured by `fit`.
        kernel: `"gaussian"`: `exp(-gamma ‖x - y‖²)`, or `"softmax"`:
            `exp(2 gamma x · y)`.
        gamma: Positive number; or, as elsewhere in scikit-learn, `"scale"` for `1 /
            (n_features · X.var())` or `"auto"` for `1 / n_features`.
        num_features: Number of random vectors of a map given by name.
        random_state: Seed of the random vectors of a map given by name: an integer,
            `RandomState` or `None`.

    Attributes:
        layer_: The fitted `keras_rfattn.layers.KernelFeatures`.
        n_features_in_: Number of columns seen by `fit`.
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
        """Draws the random vectors, and measures what the map learns from X.

        Args:
            X: Array of shape `(n, H)`.
            y: Ignored.

        Returns:
            The transformer.

        Raises:
            ValueError: If the map has other features for queries than for keys, or
                `gamma` is none of the above.
        """
        X = validate_data(self, X, dtype=("float64", "float32"))
        feature_map = self.feature_map
        if isinstance(feature_map, str):
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            feature_map = feature_maps.resolve(
                feature_map, self.num_features, int(seed)
            )
        else:
            # A copy: the caller's map stays as it is.
            feature_map = feature_maps.get(feature_map)
            feature_map = feature_map.reseeded(feature_map.seed)
        if not feature_map.is_symmetric:
            raise ValueError(
                "A transformer gives one set of features; this map has different ones "
                f"for both sides. Received: feature_map={self.feature_map!r}. Use "
                "`keras_rfattn.layers.KernelFeatures` with `side=`."
            )
        gamma = _gamma(self.gamma, X)
        self.layer_ = layers.KernelFeatures(feature_map, self.kernel, gamma)
        self.layer_.adapt(X)
        self._n_features_out = feature_map.output_dim
        return self

    def transform(self, X):
        """Random features of X.

        Args:
            X: Array of shape `(n, H)`.

        Returns:
            Array of shape `(n, M)` with the dtype of X.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=("float64", "float32"), reset=False)
        # Blocks of one length: a row's features do not depend on how many came along.
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
            weights = [np.asarray(w) for w in layer.get_weights()]
            state["_layer_weights"] = weights
        return state

    def __setstate__(self, state):
        state = dict(state)
        config = state.pop("_layer_config", None)
        weights = state.pop("_layer_weights", None)
        super().__setstate__(state)
        if config is not None:
            self.layer_ = layers.KernelFeatures.from_config(config)
            self.layer_.build((None, self.n_features_in_))
            self.layer_.set_weights(weights)
