"""Random projections: seeded Keras initializers (`base.py` states their laws)."""

import keras

from keras_rfattn.projections.base import Gaussian, Projection
from keras_rfattn.projections.orthogonal import Orthogonal, Simplex
from keras_rfattn.projections.papers.counts import (
    Counts,
    GeometricCounts,
    PoissonCounts,
)
from keras_rfattn.projections.papers.hadamard import Hadamard
from keras_rfattn.projections.papers.halton import Halton

PROJECTIONS = {
    "gaussian": Gaussian,
    "orthogonal": Orthogonal,
    "hadamard": Hadamard,
    "halton": Halton,
    "simplex": Simplex,
}

__all__ = [
    "Counts",
    "Gaussian",
    "GeometricCounts",
    "Hadamard",
    "Halton",
    "Orthogonal",
    "PROJECTIONS",
    "PoissonCounts",
    "Projection",
    "Simplex",
    "get",
]


def get(identifier, seed=0):
    """Resolves a projection from its name, config or object.

    Args:
        identifier: A name in `PROJECTIONS`, a `Projection` or its serialized config.
        seed: Seed of a projection given by name.

    Returns:
        A `Projection`.

    Raises:
        ValueError: If the name is unknown, or the object is not a `Projection`.

    Examples:
        >>> projection = keras_rfattn.projections.get("orthogonal", seed=1)
        >>> projection.get_config()
        {'seed': 1, 'norms': 'chi'}
    """
    if isinstance(identifier, str) and identifier in PROJECTIONS:
        return PROJECTIONS[identifier](seed=seed)
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, Projection):
        return identifier
    raise ValueError(
        f"`projection` must be one of {sorted(PROJECTIONS)}, a `Projection` or its "
        f"config. Received: projection={identifier!r}."
    )
