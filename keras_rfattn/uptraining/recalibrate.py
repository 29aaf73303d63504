"""Stage "calibrate": nothing that was trained is replaced, and nothing gets worse."""

import numpy as np

from keras_rfattn.uptraining.calibrate import adapt
from keras_rfattn.uptraining.resume import assign
from keras_rfattn.uptraining.resume import state_of


def calibrate_stage(model, layers, batches, before, measure):
    """Calibrates the maps of a model that were not trained.

    Parameters that were measured before, or that the model's own weights were trained
    with, are measured again but kept where the error of their layer would rise.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        batches: List of batches.
        before: Errors of the heads of all layers, `(L, N)`, with NaN for no head.
        measure: Function that measures these errors again.

    Returns:
        What was left as it was, as text; empty if nothing was.
    """
    adaptive = [x for x in layers if x.feature_map.is_adaptive]
    trained = [x for x in adaptive if x.feature_map.was_trained]
    left = [x for x in adaptive if x not in trained]
    notes = []
    if trained:
        notes.append(f"trained maps are kept: {_names(trained)}")
    if left:
        old = {
            i: state_of(layer.feature_map.weights)
            for i, layer in enumerate(layers)
            if layer in left and (layer.feature_map.is_calibrated or layer.trained)
        }
        adapt(model, left, batches)
        after = measure() if old else before
        worse = [i for i in old if np.nanmean(after[i]) > np.nanmean(before[i])]
        for i in worse:
            assign(layers[i].feature_map.weights, old[i])
        if worse:
            kept = _names([layers[i] for i in worse])
            notes.append(f"another calibration would raise the error, kept: {kept}")
    return "; ".join(notes)


def _names(layers):
    return ", ".join(f"'{layer.path}'" for layer in layers)
