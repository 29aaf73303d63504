"""Calibrates feature maps: sets parameters from data, without training."""

from collections.abc import Iterable

import keras
import numpy as np

from keras_rfattn.feature_maps.weights import assign, unchanged_on_error, values_of
from keras_rfattn.layers import record
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.uptraining.weights import paths


def calibrate(
    model: keras.layers.Layer,
    data: Iterable,
    exact: bool = True,
    max_tokens: int = 1024,
    verbose: int | str = "auto",
    discard_training: bool = False,
) -> keras.layers.Layer:
    """Measures the data that feature maps see, and stores the fitted parameters.

    In causal and cross attention, FAVOR++ must not measure the current sequence, so
    without calibration it starts as FAVOR+. Other maps (`"gerf"`, `"poisson"`,
    `"favorpp_dense"`) learn from data only in this way. A few batches of real inputs
    are enough. The result is saved with the model. An earlier calibration is replaced;
    trained weights are not, unless `discard_training` is true.

    Args:
        model: A model with linear attention.
        data: An iterable of batches; each batch is an input of `model(batch)`.
        exact: Whether the model runs with softmax attention during the measurement,
            so that every layer sees the activations of the softmax checkpoint. This
            takes memory quadratic in the sequence length. `False` measures the linear
            model as it is.
        max_tokens: Maximum number of queries and of keys used per sequence, evenly
            spread; they are held in memory for all layers.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar, 2 for one line at the
            end, as in Keras.
        discard_training: Whether maps that were trained are calibrated too. Their
            trained weights are then reset, as if they had never been trained.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If no map in it learns from data, such a map was trained and
            `discard_training` is false, `data` is empty or does not fit the model, or
            a map cannot adapt to it. The model is unchanged in these cases.
    """
    check_model(model)
    layers = adaptive_layers(model)
    trained = [x for x in layers if x.feature_map.was_trained]
    if trained and not discard_training:
        raise ValueError(
            "`model` must have no trained feature map, because calibration would "
            f"replace its weights. Received: trained maps of {paths(trained)}. Pass "
            "discard_training=True to discard their training."
        )
    recorded = record(model, data, exact, max_tokens, verbose)
    _adapt(layers, recorded, discard_training)
    return model


def _adapt(layers, recorded, discard_training=False):
    """Calibrates the maps of the given layers; if one fails, none is changed."""
    if not recorded:
        raise ValueError(
            "`data` must hold at least one batch with a real token. Received: none."
        )
    with unchanged_on_error([layer.feature_map for layer in layers]):
        for _, layer, sequences in recorded:
            if layer in layers:
                samples = [(s.query, s.key) for s in sequences]
                layer.feature_map.adapt(samples, discard_training=discard_training)


def adaptive_layers(model):
    """Returns the layers whose maps learn from data; raises if there are none."""
    layers = [x for x in linear_layers(model) if x.feature_map.is_adaptive]
    if not layers:
        raise ValueError(
            "`model` has no feature map that learns from data. Received: "
            f"{title(model)}. Replace attention with 'favorpp' first."
        )
    return layers


def calibrate_stage(model, layers, batches, before, measure):
    """Calibrates the maps that were not trained; returns which maps it kept."""
    adaptive = [x for x in layers if x.feature_map.is_adaptive]
    trained = [x for x in adaptive if x.feature_map.was_trained]
    fitted = [x for x in adaptive if x not in trained]
    calibrated = [x for x in fitted if x.feature_map.is_calibrated]
    old = {x: values_of(x.feature_map.weights) for x in calibrated}
    if fitted:
        _adapt(fitted, record(model, batches))
    after = measure()[0] if old else before
    worse = [
        layer
        for layer, first, last in zip(layers, before, after, strict=True)
        if layer in old and np.mean(last) > np.mean(first)
    ]
    for layer in worse:
        assign(layer.feature_map.weights, old[layer])
    notes = [f"trained maps were kept: {paths(trained)}"] if trained else []
    if worse:
        notes.append(f"maps whose error would increase were kept: {paths(worse)}")
    return "; ".join(notes)
