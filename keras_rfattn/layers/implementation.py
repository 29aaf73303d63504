"""Decides whether Pallas kernels or ordinary operations (XLA) compute attention."""

import keras

import keras_rfattn.feature_maps as feature_maps
from keras_rfattn.backend.precision import wide_dtype
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.ops.not_finite import bounded, spoils

# Why "auto" does not select the Pallas kernels even where they can run.
AUTO = "not timed on a TPU yet"


def obstacle(options, feature_map):
    """Returns why the Pallas kernels cannot be used, or `None` if they can."""
    if keras.backend.backend() != "jax":
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


def by_kernels(call, query, key, stats, value, key_mask):
    """Computes attention with the Pallas kernels.

    Args:
        call: The `layers.attend.Attention`.
        query: Queries as `call.prepared` returns them, `(B, T, N, H)`.
        key: Keys as `call.prepared` returns them, `(B, S, K, H)`.
        stats: The result of the map's `statistics`.
        value: Values of shape `(B, S, K, V)`.
        key_mask: Boolean array of shape `(B, S)`, true for visible keys, or `None`.

    Returns:
        Array of shape `(B, T, N, V)`.

    Raises:
        ValueError: If a `keras.distribution` is active.
    """
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "The Pallas kernels run on one device, and are not divided over several. "
            "Received: implementation='pallas' under a `keras.distribution`. Use "
            "'auto' or 'xla'."
        )
    # Imported here, because JAX may not be installed with other backends.
    from keras_rfattn.fused import tpu as pallas

    feature_map, sides = call.feature_map, []
    for side, x in (("query_features", query), ("key_features", key)):
        x = keras.ops.cast(x, wide_dtype(x))
        kept = bounded(x)
        found = feature_map.exponents(side, kept, stats)
        rows = split_heads(found.x, value.shape[2])
        common = feature_map.common_exponent(side, rows, stats)
        common = merge_heads(common, *x.shape[2:0:-1])
        sides.append(pallas.Side(kept, found, common, spoils(x)))
    mask = call.mask
    return pallas.attention(*sides, value, key_mask, mask.causal, call.options)
