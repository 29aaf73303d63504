"""Raises errors for options of attention that a map, or kernels, do not support."""

import keras_rfattn.feature_maps as feature_maps
from keras_rfattn import fused


def check_options(options, feature_map):
    """Raises `ValueError` for options that a map does not support."""
    name, reason = options.implementation, None
    if name in fused.KERNELS:
        reason = fused.kernels(name).obstacle(options, feature_map)
    if reason:
        raise ValueError(
            f"The {name.title()} kernels cannot answer this attention: {reason}. "
            f"Received: implementation={name!r}. Use 'auto' or 'xla'."
        )
    if options.sinks and options.window is None:
        raise ValueError(
            "`sinks` need a `window`: keys between the sinks and the window are "
            f"estimated by features. Received: sinks={options.sinks}, window=None. "
            "Pass a number of tokens as `window`, for example 64."
        )
    if options.window is not None and feature_map.exact_kernel is None:
        name = feature_maps.name_of(feature_map)
        names = [
            x
            for x in feature_maps.list()
            if feature_maps.class_of(x).kernel in ("softmax", "polynomial")
        ]
        raise ValueError(
            f"`window` must be `None` for {name!r}: attention within a window is "
            "exact, which needs a map whose kernel is softmax or polynomial, and its "
            f"kernel is {feature_map.kernel!r}. Received: window={options.window}. "
            f"Use window=None, or one of {names}."
        )
