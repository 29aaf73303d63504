"""Stage "calibrate", which keeps trained maps and earlier calibrations if better."""

import numpy as np

from keras_rfattn.uptraining.calibrate import adapt
from keras_rfattn.uptraining.resume import assign, state_of


def calibrate_stage(model, layers, batches, before, measure):
    """Calibrates the maps of a model that were not trained.

    A map may have been calibrated before, or weights of the model may have been trained
    with its current parameters. It is then calibrated again, but gets its old
    parameters back if the new ones raise the error of its layer.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        batches: List of batches to calibrate on.
        before: Errors of N heads of L layers before the calibration, `(L, N)`, with NaN
            for heads that are not measured.
        measure: Function without arguments that measures these errors again.

    Returns:
        Text that says which maps were left unchanged; empty if none was.
    """
    adaptive = [x for x in layers if x.feature_map.is_adaptive]
    trained = [x for x in adaptive if x.feature_map.was_trained]
    left = [x for x in adaptive if x not in trained]
    notes = []
    if trained:
        notes.append(f"trained maps were kept: {_names(trained)}")
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
            notes.append(f"maps whose error would increase were kept: {kept}")
    return "; ".join(notes)


def _names(layers):
    return ", ".join(f"'{layer.path}'" for layer in layers)
