"""Hybrid random features: several estimators, weighted by estimated coefficients."""

import keras
from keras import ops

import keras_rfattn.feature_maps.registry as registry
import keras_rfattn.papers.algebra as algebra
from keras_rfattn.arguments import derive_seed
from keras_rfattn.ops.features import Features
from keras_rfattn.papers.coefficients import AngularCoefficient
from keras_rfattn.papers.favor import Favor, FavorPlusPair
from keras_rfattn.papers.map_of_maps import MapOfMaps

# Defaults of hybrids given by name. Their width is a product: 8 · (2 + 2) · 16 = 512.
NUM_FEATURES, NUM_COEFFICIENTS = 16, 7


@keras.saving.register_keras_serializable("keras_rfattn")
class Hybrid(MapOfMaps):
    """Hybrid `Σ_k λ_k SM_k + (1 - Σ_k λ_k) SM_{p+1}` of p + 1 softmax estimators.

    SM_k are the estimators, and λ_k are coefficients. The estimate is unbiased,
    because coefficients and estimators are independent. Features are signed,
    so that the denominator of attention can come near 0;
    `keras_rfattn.ops.sums.normalize` describes the guard. Hybrids work best if queries
    and keys have bounded norms. Each part projects its input once, and the parts'
    features are then multiplied. With n vectors of a coefficient, m vectors of an
    estimator and head dim d, computing the features of a token costs
    `O(nd + md + mn)`.

    Args:
        estimators: List of p + 1 maps of the softmax kernel, as registered names, maps
            or configs. An estimator may be a hybrid itself.
        coefficients: List of p `Coefficient` maps, in the order of the first p
            estimators.
        shared: Whether all estimators use the same vectors, which reduces the variance
            (theorem 3.1). They must then have equal projections and numbers of
            features. Defaults to `False`.
        seed: Non-negative integer, from which the seed of each part is derived. If
            `None`, it is drawn from Keras' global seed generator.

    Raises:
        ValueError: If there is not exactly one more estimator than coefficients, or an
            estimator estimates another kernel.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), equation 8, lemma 2.3.

    Examples:
        >>> from keras_rfattn import papers
        >>> coefficient = papers.AngularCoefficient(num_features=3)
        >>> feature_map = papers.Hybrid(
        ...     ["favorplus", "favor"], [coefficient], seed=0)
        >>> feature_map.build((None, None, 2, 8))
        >>> features = feature_map.key_features(np.ones((1, 10, 2, 8), "float32"))
        >>> features.values.shape[-1] == feature_map.output_dim
        True
    """

    is_positive = False
    is_symmetric = False

    def __init__(self, estimators, coefficients, shared=False, seed=None, **kwargs):
        super().__init__(seed=seed, **kwargs)
        estimators = [registry.get(e) for e in estimators]
        coefficients = [registry.get(c) for c in coefficients]
        kernels = [e.kernel for e in estimators]
        if len(estimators) != len(coefficients) + 1 or set(kernels) != {"softmax"}:
            raise ValueError(
                "`estimators` must be softmax estimators, and one more than "
                f"`coefficients`. Received: estimators with kernels {kernels} and "
                f"{len(coefficients)} coefficients."
            )
        self.shared = shared
        self.estimators = [
            e.reseeded(derive_seed(self.seed, 0, 0 if shared else i))
            for i, e in enumerate(estimators)
        ]
        self.coefficients = [
            c.reseeded(derive_seed(self.seed, 1, i)) for i, c in enumerate(coefficients)
        ]

    @property
    def output_dim(self):
        weights = [c.output_dim for c in self.coefficients]
        weights = [*weights, sum(weights)]
        parts = zip(self.constants(), weights, self.estimators, strict=True)
        return sum(((c != 0) + width) * e.output_dim for c, width, e in parts)

    def parts(self):
        return [*self.estimators, *self.coefficients]

    def constants(self):
        """Returns the constants of the weights λ of all p + 1 estimators."""
        constants = [c.constant for c in self.coefficients]
        return [*constants, 1 - sum(constants)]

    def fit(self, samples):
        for part in self.parts():
            if part.is_adaptive:
                part.adapt(samples)

    def queries(self, parts, x):
        features = [part.query_features(x).dense() for part in parts]
        return combined(features, self.constants(), -1)

    def keys(self, parts, x):
        # Constants and the sign of the last weight are factors of queries.
        ones = [float(constant != 0) for constant in self.constants()]
        features = [part.key_features(x).dense() for part in parts]
        return combined(features, ones, 1)

    def get_config(self):
        return {
            **super().get_config(),
            "estimators": [registry.serialize(e) for e in self.estimators],
            "coefficients": [registry.serialize(c) for c in self.coefficients],
            "shared": self.shared,
        }


def combined(features, constants, sign):
    """Returns features of one side of `Σ_k λ_k SM_k + (1 - Σ_k λ_k) SM_{p+1}`.

    Args:
        features: List of `Features` of the p + 1 estimators, then of p coefficients.
        constants: The side's factors of the constants of all p + 1 weights.
        sign: The side's factor of the p coefficients in the last weight.
    """
    estimators, weights = features[: len(constants)], features[len(constants) :]
    weights = [*weights, algebra.scale(algebra.add(*weights), sign)]
    weights = map(with_constant, constants, weights)
    result = algebra.add(*map(algebra.multiply, weights, estimators))
    # Only one side needs values for signs, but algorithms expect them on both.
    return Features(result.ones_or_values(), result.log_scale)


def with_constant(constant, features):
    """Returns one side of features of a constant plus the kernel of other features."""
    if constant == 0:
        return features
    one = Features(None, ops.zeros_like(features.log_scale[..., :1]))
    return algebra.add(algebra.scale(one, constant), features)


class Bipolar(Hybrid):
    """Base of hybrids `λ SM++ + (1 - λ) SMtrig` of two estimators.

    They are precise both for opposite and for equal inputs. SM++ uses positive features
    with both signs of each vector (`FavorPlusPair`), and SMtrig uses trigonometric
    features (`Favor`). Both use `num_features` vectors. `num_coefficients` further
    vectors estimate λ.
    """

    def __init__(
        self,
        coefficient,
        num_features=None,
        num_coefficients=None,
        shared=True,
        projection="orthogonal",
        seed=None,
        **kwargs,
    ):
        num_features = NUM_FEATURES if num_features is None else num_features
        if num_coefficients is None:
            num_coefficients = NUM_COEFFICIENTS
        estimators = [
            FavorPlusPair(num_features, projection=projection, seed=0),
            Favor(num_features, projection=projection, seed=0),
        ]
        coefficient = coefficient(num_coefficients, projection=projection, seed=0)
        super().__init__(estimators, [coefficient], shared, seed, **kwargs)
        self.num_features = num_features
        self.num_coefficients = num_coefficients

    def get_config(self):
        part = self.estimators[0].get_config()
        return {
            **keras.layers.Layer.get_config(self),
            "num_features": self.num_features,
            "num_coefficients": self.num_coefficients,
            "shared": self.shared,
            "projection": part["projection"],
            "seed": self.seed,
        }


@keras.saving.register_keras_serializable("keras_rfattn")
class HybridAngular(Bipolar):
    """The angular hybrid, whose coefficient is `λ = θ / π`.

    θ is the angle between query and key, and is estimated from signs of projections.
    For inputs of equal norm, the variance is 0 at θ = 0 and at θ = π. Features have
    width `4 m (n + 1)`.

    Args:
        num_features: Number m of random vectors of both estimators, 16 by default.
        num_coefficients: Number n of random vectors of the coefficient, 7 by default.
        shared: Whether both estimators use the same vectors. Defaults to `True`.
        projection: How vectors are drawn: `"orthogonal"` (default), `"gaussian"` or a
            `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` or `num_coefficients` is not a positive integer,
            or `projection` is unknown.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), sections 2.4 and 3.

    Examples:
        >>> from keras_rfattn import layers, papers
        >>> feature_map = papers.HybridAngular(4, num_coefficients=2, seed=0)
        >>> layer = layers.MultiHeadAttention(
        ...     2, 8, feature_map=feature_map, temperature=0.5)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 48)
    """

    def __init__(self, num_features=None, num_coefficients=None, **kwargs):
        super().__init__(AngularCoefficient, num_features, num_coefficients, **kwargs)
