"""Compares a weights file with a model before the first weight of the model changes.

A mark in the file tells which linear attention the weights belong to (`fingerprint`).
It is not enough that each layer checks its own mark: a softmax layer does not know
the mark of a linear layer, and with `skip_mismatch=True`, Keras skips a layer that
refuses and loads the rest. This module therefore wraps the Keras function that loads
such files. Legacy HDF5 files hold only arrays and are not compared.
"""

import functools
import warnings

import numpy as np
from keras.src.saving import saving_lib

from keras_rfattn.layers.fingerprint import KEY, Marks

_keras_load_state = saving_lib._load_state


@functools.wraps(_keras_load_state)
def _load_state(saveable, weights_store, *args, **kwargs):
    is_whole = kwargs.get("inner_path", args[1] if len(args) > 1 else None) == ""
    if is_whole and weights_store:
        _check_marks(saveable, weights_store, kwargs.get("visited_saveables"))
    return _keras_load_state(saveable, weights_store, *args, **kwargs)


def _check_marks(model, weights_store, visited):
    """Raises `ValueError` if a model and a file differ in attention."""
    get, shown = weights_store.get, {}

    def get_marks(path):
        entry = get(path)
        has_mark = KEY in entry.keys()
        shown[path] = Marks({KEY: np.asarray(entry[KEY])} if has_mark else {})
        return shown[path]

    weights_store.get = get_marks
    try:
        # Keras warns about what it does not find among the marks.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _keras_load_state(
                model,
                weights_store,
                None,
                inner_path="",
                skip_mismatch=True,
                visited_saveables=set(visited or ()),
                failed_saveables=set(),
                error_msgs={},
            )
    finally:
        del weights_store.get
    for path, marks in shown.items():
        if marks.refusal is not None:
            raise ValueError(f"{marks.refusal} Nothing was loaded.")
        if KEY in marks and not marks.is_known:
            raise ValueError(
                "The weights were saved from a model with linear attention. Received: "
                f"model={type(model).__name__} '{model.name}', which has softmax "
                f"attention, while the file has a mark ({path}/{KEY}). Replace "
                "attention as it was when the weights were saved. Nothing was loaded."
            )


saving_lib._load_state = _load_state
