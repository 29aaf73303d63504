"""Random projections: seeded Keras initializers (`base.py` states their laws)."""

import importlib

import keras

from keras_rfattn.projections.base import Gaussian, Orthogonal, Projection

PROJECTIONS = {"gaussian": Gaussian, "orthogonal": Orthogonal}

# The module that adds the projections of papers to the table.
PAPERS = "keras_rfattn.papers"

__all__ = ["Gaussian", "Orthogonal", "PROJECTIONS", "Projection", "get"]


def get(identifier, seed=0):
    """Resolves a projection from its name, config or object.

    Args:
        identifier: A name in `PROJECTIONS`, a `Projection` or its serialized config.
        seed: Seed of a projection given by name.

    Returns:
        A `Projection`.
    """
    if isinstance(identifier, str):
        if identifier not in PROJECTIONS:
            importlib.import_module(PAPERS)
        if identifier in PROJECTIONS:
            return PROJECTIONS[identifier](seed=seed)
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(known(identifier))
    if isinstance(identifier, Projection):
        return identifier
    raise ValueError(
        f"`projection` must be one of {sorted(PROJECTIONS)}, a `Projection` or its "
        f"config. Received: projection={identifier!r}."
    )


def known(config):
    """Returns a serialized config; imports the papers if its class is not known yet."""
    name = str(config.get("registered_name"))
    is_known = keras.saving.get_registered_object(name) is not None
    if name.startswith("keras_rfattn>") and not is_known:
        importlib.import_module(PAPERS)
    return config
