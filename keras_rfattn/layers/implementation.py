"""Says whether Pallas kernels or ordinary operations (XLA) compute attention."""

import keras_rfattn.feature_maps as feature_maps
from keras_rfattn import fused
from keras_rfattn.backend.devices import backend_name

# Why "auto" does not select the Pallas kernels even where they can run.
AUTO = "not timed on a TPU yet"


def obstacle(options, feature_map):
    """Returns why the Pallas kernels cannot be used, or `None` if they can."""
    if not fused.has_tpu_kernels():
        return f"they run on JAX, not on {backend_name()}"
    if not feature_map.has_exponents:
        name = feature_maps.name_of(feature_map)
        return f"features of {name!r} are not exponentials of products"
    if options.sinks:
        return "they have no sinks"
    return None


def check_options(options, feature_map):
    """Raises `ValueError` for options that a map does not support.

    A window needs a map whose kernel can be computed exactly. The Pallas kernels need a
    map whose features are exponentials of products.
    """
    reason = obstacle(options, feature_map)
    if options.implementation == "pallas" and reason:
        raise ValueError(
            f"The Pallas kernels cannot answer this attention: {reason}. Received: "
            "implementation='pallas'. Use 'auto' or 'xla'."
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
            if feature_maps.FEATURE_MAPS[x].kernel in ("softmax", "polynomial")
        ]
        raise ValueError(
            f"`window` must be `None` for {name!r}: attention within a window is "
            "exact, which needs a map whose kernel is softmax or polynomial, and its "
            f"kernel is {feature_map.kernel!r}. Received: window={options.window}. "
            f"Use window=None, or one of {names}."
        )


def told(options, feature_map):
    """Returns which implementation is used and why, as text for reports."""
    if options.implementation != "auto":
        return f"{options.implementation} as asked"
    return f"xla (Pallas kernels: {obstacle(options, feature_map) or AUTO})"
