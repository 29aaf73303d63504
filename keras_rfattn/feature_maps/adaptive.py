"""Maps that measure something on data."""

import numpy as np
from keras import ops


class Adaptive:
    """Mixin of maps with parameters per head that are measured on data, and saved.

    Comes before a `FeatureMap` in the bases. Subclasses create their parameters in
    `build`, by `add_fixed`, and give `fit(samples)`, which assigns them; `adapt` says
    what a sample is. `keras_rfattn.calibrate` collects the samples of a whole model.
    """

    is_adaptive = True

    def build(self, input_shape):
        super().build(input_shape)
        if self.is_adaptive:
            self.updates = self.add_fixed("updates", "zeros", (), "int32")

    @property
    def is_calibrated(self):
        """Whether the parameters have met data."""
        if not self.built or not self.is_adaptive:
            return False
        return int(ops.convert_to_numpy(self.updates)) > 0

    def status(self, causal):
        if not self.is_adaptive:
            return ""
        return "calibrated" if self.is_calibrated else "uncalibrated"

    def adapt(self, samples):
        """Sets the parameters from data, whatever they were before.

        Args:
            samples: List of `(queries, keys)`, one for each sequence: NumPy arrays
                of shape `(K, n, H)`, scaled, real tokens only. Queries and keys
                that meet in attention are in one pair.

        Raises:
            ValueError: If there is no sample or one is not finite, or the map is not
                built or learns nothing.
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
        self.fit(samples)
        self.updates.assign(len(samples))

    def fit(self, samples):
        """Assigns the parameters from what `adapt` has checked."""
        raise NotImplementedError(f"{type(self).__name__} must implement `fit`.")
