"""Feeds tokens to a model chunk by chunk, with a state of fixed size.

    logits, state = keras_rfattn.generation.prefill(model, tokens)
    logits, state = keras_rfattn.generation.step(model, more_tokens, state)

A chunk may have any length. The logits equal those of a single pass over all chunks. A
state can be saved to a file or reused for a shared prompt. `take_rows` selects, drops
or repeats its batch rows, and `join_rows` concatenates the rows of several states.
"""

from keras_rfattn.generation.states import (
    StateBytes,
    join_rows,
    load,
    save,
    state_bytes,
    take_rows,
)
from keras_rfattn.generation.streaming import prefill, step
from keras_rfattn.models.generation import Cache

__all__ = [
    "Cache",
    "StateBytes",
    "join_rows",
    "load",
    "prefill",
    "save",
    "state_bytes",
    "step",
    "take_rows",
]
