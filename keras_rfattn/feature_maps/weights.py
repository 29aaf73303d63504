"""Weights of feature maps: float32, with fixed paths, from data, aware of training.

Training sets no flag. Whether it changed a map is computed from the weights, so that
the answer is the same after saving and loading: a map that measured data keeps a
checksum of its trained weights, and the weights of any other map are compared with
those that its seed and its number of draws determine.
"""

import contextlib
import re
import zlib

import keras
import numpy as np
from keras import ops
from keras.src.utils.naming import to_snake_case


@keras.saving.register_keras_serializable("keras_rfattn")
class NotPositive(keras.constraints.Constraint):
    """Keeps a weight at most 0."""

    def __call__(self, w):
        return keras.ops.minimum(w, 0)


class Weights:
    """Mixin of Keras layers with fixed weight paths and random weights to redraw."""

    def __setattr__(self, name, value):
        fix_name(value, name)
        super().__setattr__(name, value)

    def add_trained(self, name, value, shape=None, dtype="float32", **kwargs):
        """Adds a weight that training changes and no dtype policy casts.

        Args:
            name: Name of the weight.
            value: Initial value, as a NumPy array, or an initializer.
            shape: Shape of the weight. Needed only if `value` is an initializer.
            dtype: `"float32"` (default) or `"int32"`.
            **kwargs: Further arguments of `keras.layers.Layer.add_weight`.

        Returns:
            The `keras.Variable`.
        """
        if isinstance(value, np.ndarray):
            shape, value = value.shape, keras.initializers.Constant(value)
        return self.add_weight(
            name=name, shape=shape, initializer=value, dtype=dtype, autocast=False,
            **kwargs,
        )  # fmt: skip

    def add_fixed(self, name, value, shape=None, dtype="float32"):
        """Adds a weight as `add_trained` does, but one that no optimizer changes."""
        return self.add_trained(name, value, shape, dtype, trainable=False)

    @property
    def was_trained(self):
        """Whether training changed a weight of the map since the library set it."""
        if not self.built or not trained_weights(self):
            return False
        weights, first = (values_of(trained_weights(x)) for x in (self, as_drawn(self)))
        # Platforms round random draws differently. Weights that are NaN were trained.
        return not all(
            np.allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b), initial=0))
            for a, b in zip(weights, first, strict=True)
        )

    def redraw(self):
        """Replaces the random vectors by the next draw of the same seed.

        The number of draws is saved with the model. The library never calls this
        method by itself.

        Raises:
            ValueError: If the map has no random vectors, is not built, or its vectors
                were trained. The map is then unchanged.
        """
        if not self.built:
            raise ValueError(
                f"{type(self).__name__} has no random vectors to redraw yet. Received: "
                "built=False. Build it first."
            )
        parts = self._flatten_layers()
        replaces_trained = any(getattr(x, "draws_trained", False) for x in parts)
        if replaces_trained:
            check_not_trained(self, "redraw")
        with unchanged_on_error([self]):
            self.draw_again()
            if replaces_trained:
                mark(self)

    def draw_again(self):
        """Assigns the next draw, for `redraw`."""
        raise ValueError(
            f"{type(self).__name__} has no random vectors to redraw. Received: "
            "a map that draws none. Use a map with random vectors, such as 'favorpp'."
        )


class Adaptive:
    """Mixin of maps whose per-head parameters are measured on data and saved.

    The mixin must come before `FeatureMap` in the bases. Subclasses create their
    parameters in `build` with `add_fixed`, and implement `fit(samples)`, which assigns
    them. `adapt` describes the samples. `keras_rfattn.calibrate` collects samples for
    all maps of a model.

    The saved weight `updates` is 0 before the first call of `adapt`, and the number of
    samples after it. In a map with trained weights, `updates` is instead a checksum of
    these weights, from which `was_trained` later tells whether training has changed
    them.
    """

    is_adaptive = True

    def build(self, input_shape):
        super().build(input_shape)
        if self.is_adaptive:
            self.updates = self.add_fixed("updates", "zeros", (), "int32")

    @property
    def is_calibrated(self):
        """Whether the parameters were set from data."""
        return self.built and self.is_adaptive and integer(self.updates) > 0

    @property
    def was_trained(self):
        if not self.is_calibrated:
            return super().was_trained
        return bool(trained_weights(self)) and integer(self.updates) != mark_of(self)

    def status(self, causal):
        if not self.is_adaptive:
            return ""
        if self.is_calibrated:
            return "calibrated"
        measures = self.measures_sequence and causal is False
        return "statistics per sequence" if measures else "uncalibrated"

    def adapt(self, samples):
        """Sets the parameters from data, and replaces earlier measurements.

        Args:
            samples: List of pairs `(queries, keys)`, one for each sequence. Both are
                NumPy arrays of shape `(K, n, H)`, scaled, for K key/value heads and n
                real tokens. A pair holds queries and keys that attend to each other.

        Raises:
            ValueError: If there is no sample, a sample is not finite, the map is not
                built or measures nothing on data, or it was trained. The map is then
                unchanged.
        """
        if not self.built or not self.is_adaptive or not samples:
            raise ValueError(
                f"{type(self).__name__} cannot adapt. Received: {len(samples)} "
                f"samples, built={self.built}, is_adaptive={self.is_adaptive}."
            )
        if not all(np.all(np.isfinite(x)) for pair in samples for x in pair):
            raise ValueError(
                f"{type(self).__name__} cannot adapt to queries and keys that are not "
                "finite. Received: samples with NaN or infinity."
            )
        check_not_trained(self, "adapt")
        with unchanged_on_error([self]):
            self.fit(samples)
            self.updates.assign(len(samples))
            mark(self)

    def fit(self, samples):
        """Assigns the parameters from samples that `adapt` has checked."""
        raise NotImplementedError(f"{type(self).__name__} must implement `fit`.")


def trained_weights(feature_map):
    """Returns the trained variables of a map and its inner maps, even if frozen."""
    layers = feature_map._flatten_layers()
    return [v for layer in layers for v in layer._trainable_variables]


def values_of(variables):
    """Returns copies of the values of variables as a list of NumPy arrays."""
    return [np.array(as_numpy(v.value)) for v in variables]


def assign(variables, values):
    """Assigns values, as `values_of` returns them, to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def as_drawn(feature_map):
    """Returns a copy of a built map as it was before training and calibration."""
    copy = type(feature_map).from_config(feature_map.get_config())
    copy.build((None, None, feature_map.num_heads, feature_map.head_dim))
    parts = zip(copy._flatten_layers(), feature_map._flatten_layers(), strict=True)
    for part, original in parts:
        draws = getattr(original, "draws", None)
        if draws is not None and integer(draws):
            part.assign_vectors(integer(draws))
            part.draws.assign(draws)
    return copy


def check_not_trained(feature_map, method):
    """Raises `ValueError` for a map that was trained."""
    if feature_map.was_trained:
        raise ValueError(
            f"`{method}` would replace weights of {type(feature_map).__name__} that "
            "were trained. Received: a trained map. Use a new map, or restore "
            "attention and replace it again."
        )


def mark_of(feature_map):
    """Returns a positive int32 that changes if a trained weight of the map changes."""
    return checksum(values_of(trained_weights(feature_map))) & 0x7FFFFFFF or 1


def mark(feature_map):
    """Records that the trained weights have the values that the library set."""
    for part in feature_map._flatten_layers():
        updates = getattr(part, "updates", None)
        if updates is not None and trained_weights(part) and integer(updates):
            updates.assign(mark_of(part))


def checksum(arrays):
    """Returns a 32-bit checksum of the entries of all arrays."""
    total = 0
    for array in arrays:
        array = np.ascontiguousarray(as_numpy(array))
        total = zlib.crc32(array.reshape(-1).view(np.uint8), total)
    return total


@contextlib.contextmanager
def unchanged_on_error(feature_maps):
    """Context manager that restores the weights of built maps if its block raises."""
    weights = [w for feature_map in feature_maps for w in feature_map.weights]
    before = values_of(weights)
    try:
        yield
    except BaseException:
        assign(weights, before)
        raise


def as_numpy(array):
    """Converts a tensor, or the value of a variable, to a NumPy array."""
    if array.shape == ():
        # NumPy cannot convert scalar variables of TensorFlow's distribution strategies.
        return ops.convert_to_numpy(ops.reshape(array, (1,)))[0]
    return ops.convert_to_numpy(array)


def integer(variable):
    """Returns the value of a scalar variable as an integer."""
    return int(as_numpy(variable.value))


def fix_name(value, name):
    """Names a layer that has an automatic name, and all inside it or in a list."""
    # Keras numbers automatic names in order of creation, so that the path of a weight
    # would depend on which layers were created before.
    name = name.lstrip("_")
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            fix_name(item, f"{name}_{key}")
    if not isinstance(value, keras.layers.Layer):
        return
    automatic = rf"{to_snake_case(type(value).__name__)}(_\d+)?"
    if not value.built and re.fullmatch(automatic, value.name):
        value.name = name
    attributes = dict(vars(value))
    # PyTorch keeps sublayers apart from the other attributes.
    attributes.update(attributes.pop("_modules", {}))
    # Lists of all sublayers, which Keras and TensorFlow keep, give worse names.
    last = "_layers", "_self_"
    for attribute in sorted(attributes, key=lambda x: x.startswith(last)):
        fix_name(attributes[attribute], attribute)
