"""Facts about a model that this package keeps with it, outside of Keras' tracking."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Notes:
    """Facts about one model, which are neither saved nor copied with it."""

    # Name of an input -> number of tokens for which the model has positions.
    token_limits: dict = dataclasses.field(default_factory=dict)
    # "attention" entry of the config of a model whose layers are not built yet.
    pending_attention: Any = None
    stream: Any = None  # the `generation.streaming.Stream`


def notes_of(model):
    """Returns the `Notes` of a layer or model, which are created on first use."""
    # Keras would track and save what an ordinary assignment adds.
    notes = vars(model).get("_rfattn_notes")
    if notes is None:
        notes = vars(model)["_rfattn_notes"] = Notes()
    return notes
