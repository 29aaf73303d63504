"""Facts about a model that this package keeps with it, outside of Keras' tracking."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Notes:
    """Facts about one model, which are neither saved nor copied with it.

    Attributes:
        token_limits: Dict from the name of an input to the number of tokens for which
            the model has positions (see `positions.token_limit`).
        pending_attention: The "attention" entry of the config from which the model was
            made, until its layers are built; then `None`.
        shared_with: Class and name of each other task that changed too when the
            model's attention was replaced.
        optimizer: The optimizer that `optimizers` gave other slots, with the numbers of
            weights that came and went; or `None`.
        stream: The `generation.streaming.Stream` of the model, or `None`.
    """

    token_limits: dict = dataclasses.field(default_factory=dict)
    pending_attention: Any = None
    shared_with: tuple = ()
    optimizer: Any = None
    stream: Any = None


def notes_of(model):
    """Returns the `Notes` of a layer or model, which are created on first use."""
    # Keras would track and save what an ordinary assignment adds.
    notes = vars(model).get("_rfattn_notes")
    if notes is None:
        notes = vars(model)["_rfattn_notes"] = Notes()
    return notes
