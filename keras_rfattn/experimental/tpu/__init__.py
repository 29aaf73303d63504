"""Attention by exponential features as Pallas kernels for TPUs, on JAX.

The kernels read queries and keys and write outputs. Features, running maxima and sums
stay in the chip's own memory, in the forward and in the backward pass. Measured:
outputs and gradients in the interpreter, against ordinary operations
(`tests/experimental/test_pallas.py`), and that they compile for TPUs v5e and v6e
(`tests/tpu`). Not measured: any time, because no TPU was at hand. The kernels return to
core with a timed row in which they take at most 1/1.3 of the time of XLA's operations.
"""

import keras

import keras_rfattn.feature_maps as feature_maps


def obstacle(options, feature_map):
    """Returns why the kernels cannot run here, or `None` if they can."""
    if keras.backend.backend() != "jax":
        return f"they run on JAX, not on the backend {keras.backend.backend()!r}"
    if options.sinks:
        return f"they have no sinks, and {options.sinks} are asked for"
    if not feature_map.has_exponents:
        name = feature_maps.name_of(feature_map)
        return f"features of {name!r} are not exponentials of products"
    return None


def attention(features, value, local, key_mask, is_causal, options):
    """Computes attention; see `keras_rfattn.fused.attention`."""
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "The Pallas kernels run on one device, and are not divided over several. "
            "Received: implementation='pallas' under a `keras.distribution`. Use "
            "'auto' or 'xla'."
        )
    # Imported here, because JAX may be missing.
    from keras_rfattn.experimental.tpu import convert

    return convert.attention(features, value, local, key_mask, is_causal, options)
