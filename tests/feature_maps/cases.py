"""What tests need to know of a map beyond what it says of itself: a row a map.

A map without a row is tested by every contract too, as `Case()`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from keras_rfattn import feature_maps

DIM = 4  # of the estimators' inputs


class Estimator(NamedTuple):
    """Arguments of a map, and the A or the weights of its one head."""

    arguments: dict
    a: float | None = None
    weights: dict = {}


@dataclass(frozen=True)
class Case:
    """How to test a map.

    Attributes:
        arguments: Of its constructor, for a map of little width; `None` for a
            `num_features` of 24, if it has one.
        size: What queries and keys are multiplied by where its variance is so large
            that rows of few features would be sums of noise.
        prepare: Done to a built map.
        meets_data: Whether a map that learns from data has met some.
        suits_noise: Whether it can learn from tokens of mean 0.
        is_sharp: Whether large logits choose among keys.
        narrow: Factor on the tolerance of gradients in narrow dtypes.
        low_precision: Tolerance of a whole layer in them.
        config: Arguments none of which is at its default.
        estimators: Arguments whose mean and variance are tested by draws, by label.
        heads: Of a prediction of errors, enough for squares without a long tail.
        wide: `num_features` of a map that is near its kernel.
    """

    arguments: dict | None = None
    size: float = 1.0
    prepare: Callable | None = None
    meets_data: bool = True
    suits_noise: bool = True
    is_sharp: bool = True
    narrow: float = 3
    low_precision: float = 0.08
    config: dict = field(default_factory=dict)
    estimators: dict = field(default_factory=lambda: {"": Estimator({})})
    heads: int = 80
    wide: int = 20_000


def stacked(a):
    return np.stack([np.real(a), np.imag(a)])


# Real, imaginary and full A of complex exponential features.
SIZES_OF_A = np.array([0.8, 1.1, 0.9, 1.2])
COMPLEX_A = SIZES_OF_A * np.array([1, 1j, 1, 1j])
FULL_A = np.eye(DIM) + 0.2 * np.sin(np.arange(DIM * DIM).reshape(DIM, DIM))
SHIFT = np.full(DIM, -0.7)


def louder(feature_map):
    """Fresh networks say next to nothing, beside the 1 of polynomial attention."""
    for network in feature_map.networks[0]:
        network.steps[-1].kernel.assign(3 * network.steps[-1].kernel)


# Widths are such that JAX compiles an algorithm once for all positive maps, 24, and
# once for signed ones, 48.
HYBRID = {"size": 0.25, "estimators": {}, "wide": 200}
CASES = {
    "favor": Case(size=0.5, low_precision=0.4),
    "favorpp": Case(
        estimators={"A = 0": Estimator({}), "A = -0.1": Estimator({}, a=-0.1)}
    ),
    "favorpp_dense": Case(
        estimators={"A = 0": Estimator({}), "A = -0.1": Estimator({}, a=-0.1)}
    ),
    "gerf": Case(
        size=0.5,
        heads=30,
        estimators={
            f"s = {s}": Estimator({}, weights={"parameters": [-0.05, 0.08, s]})
            for s in (-1, 1)
        },
    ),
    "poisson": Case(
        {"num_features": 48},
        size=0.4,
        heads=400,
        config={"parameter": 0.3},
        estimators={"": Estimator({"parameter": 0.15})},
    ),
    "geometric": Case(
        {"num_features": 48},
        size=0.4,
        config={"parameter": 0.3},
        estimators={"": Estimator({"parameter": 0.85})},
    ),
    # Shifted by the least of few samples, steep at that; they start well below.
    "poisson_positive": Case(
        meets_data=False,
        config={"parameter": 0.3},
        estimators={"": Estimator({"parameter": 1.0}, weights={"shift": SHIFT})},
    ),
    "geometric_positive": Case(
        meets_data=False,
        config={"parameter": 0.3},
        estimators={"": Estimator({"parameter": 0.6}, weights={"shift": SHIFT})},
    ),
    "complex_exponential": Case(
        size=0.5,
        # Means near 0 would make A and the variance extreme.
        suits_noise=False,
        config={"form": "full"},
        estimators={
            "complex": Estimator({}, weights={"matrix": stacked(COMPLEX_A)}),
            "real": Estimator(
                {"form": "real"}, weights={"matrix": stacked(SIZES_OF_A)}
            ),
            "full": Estimator(
                {"form": "full"},
                weights={"matrix": FULL_A, "inverse": np.linalg.inv(FULL_A).T},
            ),
        },
    ),
    "hedgehog": Case(config={"num_features": 7}),
    "hybrid_angular": Case(
        {"num_features": 4, "num_coefficients": 2},
        config={"num_coefficients": 3, "shared": False},
        **HYBRID,
    ),
    "hybrid_gaussian": Case(
        {"num_features": 4, "num_coefficients": 1, "radius": 1.5},
        config={"num_coefficients": 3, "sigma": 0.7, "radius": 2.0},
        **HYBRID,
    ),
    "hybrid_clustered": Case(
        {"num_features": 6},
        # A sum rounded to the other side of a cluster's border is a jump.
        narrow=10,
        config={"num_clusters": [3, 2], "num_pairs": 4, "form": "complex"},
        **{**HYBRID, "size": 1.0},
    ),
    "hybrid_gaussian_mixture": Case(
        {"num_features": 16, "num_coefficients": 1, "num_clusters": (1, 1)},
        config={"num_coefficients": 3, "num_clusters": [1, 2], "tau": 2.0},
        **HYBRID,
    ),
    "polynomial": Case({"degree": 2}, config={"degree": 6}),
    "polysketch": Case({"num_features": 4}, config={"degree": 8}),
    "polysketch_linear": Case({"num_features": 4}, config={"degree": 8}),
    "polysketch_learned": Case(
        {"num_features": 4}, prepare=louder, config={"degree": 8}
    ),
    # Their features grow with the token, not exponentially.
    "elu": Case(is_sharp=False),
    "relu": Case(is_sharp=False),
}
DEFAULT = Case()


def case(name):
    """The row of a map, or what suits any."""
    return CASES.get(name, DEFAULT)


def names(**attributes):
    """Names of the maps whose class has these attributes; nothing is built."""
    return [
        name
        for name in feature_maps.list()
        if all(
            getattr(feature_maps.class_of(name), k) == v for k, v in attributes.items()
        )
    ]
