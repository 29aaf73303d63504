"""Token streams: a state that has one size, and what can be done with it.

    logits, state = keras_rfattn.generation.prefill(model, tokens)
    logits, state = keras_rfattn.generation.step(model, more_tokens, state)

Chunks may have any length; outputs are those of one pass over all of them. A state can
be saved, copied for a shared prompt, and its rows taken, dropped, repeated and joined.
"""

from keras_rfattn.generation.states import join_rows
from keras_rfattn.generation.states import load
from keras_rfattn.generation.states import save
from keras_rfattn.generation.states import take_rows
from keras_rfattn.generation.streaming import prefill
from keras_rfattn.generation.streaming import step
from keras_rfattn.models.generation import Cache

__all__ = ["Cache", "join_rows", "load", "prefill", "save", "step", "take_rows"]
