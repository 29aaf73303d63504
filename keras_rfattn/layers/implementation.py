"""Decides whether Pallas kernels or ordinary operations (XLA) compute attention."""

import keras

import keras_rfattn.feature_maps as feature_maps
from keras_rfattn import fused
from keras_rfattn.ops.layout import heads_first

# Why "auto" does not select the Pallas kernels even where they can run.
AUTO = "not timed on a TPU yet"


def obstacle(options, feature_map):
    """Returns why the Pallas kernels cannot be used, or `None` if they can."""
    if not fused.has_tpu_kernels():
        return f"they run on JAX, not on {keras.backend.backend()}"
    if not feature_map.has_exponents:
        name = feature_maps.name_of(feature_map)
        return f"features of {name!r} are not exponentials of products"
    return None


def check_implementation(options, feature_map):
    """Raises `ValueError` if Pallas kernels are requested but cannot be used."""
    reason = obstacle(options, feature_map)
    if options.implementation == "pallas" and reason:
        raise ValueError(
            f"The Pallas kernels cannot answer this attention: {reason}. Received: "
            "implementation='pallas'. Use 'auto' or 'xla'."
        )


def check_options(options, feature_map):
    """Raises `ValueError` for options that a map does not support.

    A window needs a map whose kernel can be computed exactly. The Pallas kernels need a
    map whose features are exponentials of products.
    """
    check_implementation(options, feature_map)
    if options.window is not None and feature_map.exact_kernel is None:
        name = feature_maps.name_of(feature_map)
        raise ValueError(
            f"`window` must be `None` for {name!r}: attention within a window is "
            "exact, which needs a map whose kernel is softmax or polynomial, and its "
            f"kernel is {feature_map.kernel!r}. Received: window={options.window}. "
            f"Use window=None, or one of {_with_exact_kernel()}."
        )


def _with_exact_kernel():
    """Returns the registered names of maps that support a window."""
    return [
        name
        for name in feature_maps.list()
        if feature_maps.FEATURE_MAPS[name].kernel in ("softmax", "polynomial")
    ]


def told(options, feature_map):
    """Returns which implementation is used and why, as text for reports."""
    if options.implementation != "auto":
        return f"{options.implementation} as asked"
    return f"xla ({obstacle(options, feature_map) or AUTO})"


def by_kernels(call, prepared, deferred, value, local, key_mask):
    """Computes attention with fused kernels, if the options and the device allow it.

    Args:
        call: The `layers.attend.Attention`, with finite tokens.
        prepared: Queries and keys as `call.prepared` returns them.
        deferred: The `Deferred` features of the queries and the keys.
        value: Values of shape `(B, S, K, V)`.
        local: The `ops.Local` if the options have a window, else `None`.
        key_mask: Boolean array of shape `(B, S)`, true for visible keys, or `None`.

    Returns:
        Array of shape `(B, T, N, V)`, or `None` if ordinary operations should be used.

    Raises:
        ValueError: If Pallas kernels are requested under a `keras.distribution`.
    """
    implementation, causal = call.options.implementation, call.mask.causal
    if implementation == "auto" and not causal:
        return fused.on_a_cpu(deferred, value, local, key_mask)
    if implementation != "pallas":
        return None
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "The Pallas kernels run on one device, and are not divided over several. "
            "Received: implementation='pallas' under a `keras.distribution`. Use "
            "'auto' or 'xla'."
        )
    features = [heads_first(x, value.shape[2]) for x in deferred]
    sides = zip(prepared, features, strict=True)
    return fused.on_a_tpu(*sides, value, key_mask, causal, call.options)
