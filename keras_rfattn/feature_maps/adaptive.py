"""The mixin of feature maps whose parameters are measured on data."""

import numpy as np

from keras_rfattn.feature_maps.weights import (
    check_not_trained,
    integer,
    mark,
    mark_of,
    trained_weights,
    unchanged_on_error,
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
