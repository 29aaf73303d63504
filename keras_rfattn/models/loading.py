"""Weights files are compared with a model before its first weight changes.

A layer can only refuse its own weights: a softmax layer does not know the mark of a
linear one, `skip_mismatch=True` makes Keras leave out what is refused and load the
rest, and whole models in legacy HDF5 files hold arrays alone. The functions of Keras
that load and write such files are therefore wrapped.
"""

import functools

import numpy as np
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_rfattn.layers.fingerprint import KEY
from keras_rfattn.layers.fingerprint import Marks
from keras_rfattn.layers.fingerprint import fingerprint
from keras_rfattn.layers.linear_attention import LinearAttention


def _wrap(module, name, wrapper):
    """Wraps a function of Keras, which may be gone in another release."""
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    setattr(module, name, wrapped)


def _load_state(original, saveable, weights_store, *args, **kwargs):
    """Keras' loader of one object and all inside it."""
    is_whole = kwargs.get("inner_path", args[1] if len(args) > 1 else None) == ""
    if is_whole and weights_store:
        visited = kwargs.get("visited_saveables")
        _check_marks(original, saveable, weights_store, visited)
    return original(saveable, weights_store, *args, **kwargs)


def _check_marks(load, model, weights_store, visited):
    """Raises `ValueError` if attention differs between a model and a file."""
    get, shown = weights_store.get, {}

    def get_marks(path):
        entry = get(path)
        has_mark = KEY in entry.keys()
        shown[path] = Marks({KEY: np.asarray(entry[KEY])} if has_mark else {})
        return shown[path]

    weights_store.get = get_marks
    try:
        load(
            model, weights_store, None, inner_path="", skip_mismatch=True,
            visited_saveables=set(visited or ()), failed_saveables=set(),
            error_msgs={},
        )  # fmt: skip
    finally:
        del weights_store.get
    for path, marks in shown.items():
        if marks.refusal is not None:
            raise ValueError(f"{marks.refusal} Nothing was loaded.")
        if KEY in marks and not marks.is_known:
            raise ValueError(
                "The weights were saved from a model with linear attention. Received: "
                f"model={type(model).__name__} '{model.name}', which has softmax "
                f"attention where the file has a mark ({path}/{KEY}). Replace "
                "attention as it was when the weights were saved. Nothing was loaded."
            )


def _marks_of(layer):
    """The marks of all linear attention in a layer, `(n, 2)` integers."""
    layers = layer._flatten_layers()
    found = [fingerprint(x) for x in layers if isinstance(x, LinearAttention)]
    return np.array(found, "int32").reshape(-1, 2)


def _save_legacy(original, group, model):
    original(group, model)
    for layer in model.layers:
        marks = _marks_of(layer)
        if len(marks):
            group[layer.name].attrs[KEY] = marks


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
    """The groups of layers that have weights, in the order of the layers."""
    load = legacy_h5_format.load_attributes_from_hdf5_group
    groups = [group[name] for name in load(group, "layer_names")]
    return [x for x in groups if len(load(x, "weight_names"))]


def _check_legacy(model, pairs):
    for group, layer in pairs:
        # Files of softmax models, and of earlier versions, have none.
        if KEY in group.attrs and not np.array_equal(
            group.attrs[KEY], _marks_of(layer)
        ):
            raise ValueError(
                "The weights were saved from linear attention of another mechanism, or "
                "with other arguments or another window. Received: "
                f"model={type(model).__name__} '{model.name}', layer '{layer.name}'. "
                "Replace attention as it was when the weights were saved. Nothing was "
                "loaded."
            )


_wrap(saving_lib, "_load_state", _load_state)
_wrap(legacy_h5_format, "save_weights_to_hdf5_group", _save_legacy)
_wrap(legacy_h5_format, "load_weights_from_hdf5_group", _load_legacy)
_wrap(legacy_h5_format, "load_weights_from_hdf5_group_by_name", _load_legacy_by_name)
