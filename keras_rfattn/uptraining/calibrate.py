"""Calibrates feature maps: sets parameters from data, without training."""

from collections.abc import Iterable

import keras

from keras_rfattn.feature_maps.weights import unchanged_on_error
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
) -> keras.layers.Layer:
    """Measures the data that feature maps see, and stores the fitted parameters.

    In causal and cross attention, FAVOR++ must not measure the current sequence, so
    without calibration it starts as FAVOR+. Other maps (`"gerf"`, `"poisson"`,
    `"favorpp_dense"`) learn from data only in this way. A few batches of real inputs
    are enough. The result is saved with the model. An earlier calibration is replaced;
    a map that was trained is refused.

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

    Returns:
        The model.

    Raises:
        ValueError: If no map in it learns from data, such a map was trained, `data` is
            empty or does not fit the model, or a map cannot adapt to it. The model is
            unchanged in these cases.
    """
    check_model(model)
    layers = adaptive_layers(model)
    trained = [x for x in layers if x.feature_map.was_trained]
    if trained:
        raise ValueError(
            "`model` must have no trained feature map, because calibration would "
            f"replace its weights. Received: trained maps of {paths(trained)}. Call "
            "`restore_attention`, then `replace_attention`, to discard their training."
        )
    _adapt(layers, record(model, data, exact, max_tokens, verbose))
    return model


def _adapt(layers, recorded):
    """Calibrates the maps of the given layers; if one fails, none is changed."""
    if not recorded:
        raise ValueError(
            "`data` must hold at least one batch with a real token. Received: none."
        )
    with unchanged_on_error([layer.feature_map for layer in layers]):
        for _, layer, sequences in recorded:
            if layer in layers:
                samples = [(s.query, s.key) for s in sequences]
                layer.feature_map.adapt(samples)


def adaptive_layers(model):
    """Returns the layers whose maps learn from data; raises if there are none."""
    layers = [x for x in linear_layers(model) if x.feature_map.is_adaptive]
    if not layers:
        raise ValueError(
            "`model` has no feature map that learns from data. Received: "
            f"{title(model)}. Replace attention with 'favorpp' first."
        )
    return layers


def calibrate_stage(model, layers, batches):
    """Calibrates maps that were neither trained nor calibrated; names the others."""
    adaptive = [x for x in layers if x.feature_map.is_adaptive]
    maps = [(x, x.feature_map) for x in adaptive]
    kept = [x for x, fitted in maps if fitted.was_trained or fitted.is_calibrated]
    fresh = [x for x in adaptive if x not in kept]
    if fresh:
        _adapt(fresh, record(model, batches))
    return f"trained or calibrated maps were kept: {paths(kept)}" if kept else ""
