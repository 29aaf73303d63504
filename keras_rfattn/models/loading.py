"""Compares a weights file with a model before the first weight of the model changes.

A mark in the file tells which linear attention the weights belong to (`fingerprint`).
It is not enough that each layer checks its own mark: a softmax layer does not know
the mark of a linear layer; with `skip_mismatch=True`, Keras skips a layer that refuses
and loads the rest; and legacy HDF5 files hold only arrays. This module therefore wraps
the Keras functions that load and write such files.
"""

import functools
import warnings

import numpy as np
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_rfattn.layers.fingerprint import KEY, Marks, agrees, fingerprint
from keras_rfattn.layers.recording import linear_layers


def _wrap(module, name, wrapper):
    """Wraps a Keras function, unless this release of Keras does not have it."""
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    setattr(module, name, wrapped)


def _load_state(original, saveable, weights_store, *args, **kwargs):
    """Wraps Keras' loader of one object and everything inside it."""
    is_whole = kwargs.get("inner_path", args[1] if len(args) > 1 else None) == ""
    if is_whole and weights_store:
        visited = kwargs.get("visited_saveables")
        _check_marks(original, saveable, weights_store, visited)
    return original(saveable, weights_store, *args, **kwargs)


def _check_marks(load, model, weights_store, visited):
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
            load(
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


def _save_legacy(original, group, model):
    original(group, model)
    for layer in model.layers:
        marks = [fingerprint(x) for x in linear_layers(layer)]
        if marks:
            group[layer.name].attrs[KEY] = np.array(marks, "int32")


def _load_legacy(original, group, model, *args, **kwargs):
    layers = [x for x in model.layers if x.weights]
    pairs = zip(_legacy_groups(group), layers, strict=False)
    _check_legacy(model, pairs)
    return original(group, model, *args, **kwargs)


def _load_legacy_by_name(original, group, model, *args, **kwargs):
    groups = {x.name.rpartition("/")[2]: x for x in _legacy_groups(group)}
    pairs = [(groups[x.name], x) for x in model.layers if x.name in groups]
    _check_legacy(model, pairs)
    return original(group, model, *args, **kwargs)


def _legacy_groups(group):
    """Returns the HDF5 groups of layers with weights, in the order of the layers."""
    load = legacy_h5_format.load_attributes_from_hdf5_group
    groups = [group[name] for name in load(group, "layer_names")]
    return [x for x in groups if len(load(x, "weight_names"))]


def _check_legacy(model, pairs):
    for group, layer in pairs:
        # Files of softmax models have no marks.
        if KEY not in group.attrs:
            continue
        linear, marks = linear_layers(layer), group.attrs[KEY]
        if len(linear) != len(marks) or not all(map(agrees, linear, marks)):
            raise ValueError(
                "The weights were saved from linear attention with another mechanism, "
                "other arguments or another window. Received: "
                f"model={type(model).__name__} '{model.name}', layer '{layer.name}'. "
                "Replace attention as it was when the weights were saved. Nothing was "
                "loaded."
            )


_wrap(saving_lib, "_load_state", _load_state)
_wrap(legacy_h5_format, "save_weights_to_hdf5_group", _save_legacy)
_wrap(legacy_h5_format, "load_weights_from_hdf5_group", _load_legacy)
_wrap(legacy_h5_format, "load_weights_from_hdf5_group_by_name", _load_legacy_by_name)
