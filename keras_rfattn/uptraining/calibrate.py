"""Setting stored statistics from data, without training."""

from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.attention import check_model
from keras_rfattn.layers.attention import title


def calibrate(model, data):
    """Measures what feature maps store of their data, and stores it.

    Causal and cross attention may not look at the sequence at hand, so that FAVOR++
    starts as FAVOR+ there. A few batches of real inputs give it its parameter; the
    result is saved with the model. Statistics measured before are replaced.

    Args:
        model: A model with linear attention.
        data: An iterable of batches, each what `model(batch)` takes.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If nothing in it stores statistics, or `data` is empty.
    """
    check_model(model)
    layers = [x for x in model._flatten_layers() if isinstance(x, LinearAttention)]
    maps = [x.feature_map for x in layers if hasattr(x.feature_map, "calibrating")]
    maps = [x for x in maps if x.stores_statistics]
    if not maps:
        raise ValueError(
            "`model` has no feature map that stores statistics. Received: "
            f"{title(model)}. Replace attention with 'favorpp' first."
        )
    batches = 0
    for feature_map in maps:
        feature_map.updates.assign(0)
        feature_map.calibrating = True
    try:
        for batch in data:
            model(batch, training=False)
            batches += 1
    finally:
        for feature_map in maps:
            feature_map.calibrating = False
    if not batches:
        raise ValueError("`data` must hold at least one batch. Received: none.")
    return model
