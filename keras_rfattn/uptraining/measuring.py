"""Measures the errors of attention layers before and after training."""

import keras
import numpy as np

from keras_rfattn.layers.recording import progress, run
from keras_rfattn.uptraining.attention import QUANTITIES, AttentionStage, relative
from keras_rfattn.uptraining.data import HEAD
from keras_rfattn.uptraining.interrupts import Interrupts


class Measuring:
    """Measures the errors of layers on the first batches of the data.

    It uses a separate Keras model that is compiled once. The models that train are
    compiled again for each stage, which would discard the compiled function.

    Args:
        teacher: The `Teacher` of the model.
        layers: The linear attention layers to measure.
        batches: The data, as `Batches`.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar, 2 for one line at the
            end, as in Keras.
    """

    def __init__(self, teacher, layers, batches, verbose):
        self.layers, self.batches, self.verbose = layers, batches, verbose
        self.stage = AttentionStage(teacher, layers)

    def __call__(self, when, must_be_finite=False):
        """Measures the errors of L layers with up to N heads.

        Args:
            when: Text that completes the line above the progress bar.
            must_be_finite: Whether to raise if an error is not finite.

        Returns:
            Two arrays `(L, N)`: the relative squared errors of heads, and those of
            uniform attention. They are NaN for heads that stay softmax, and for heads
            that a layer lacks because other layers have more.

        Raises:
            ValueError: If a layer receives no real token, or if an error is not finite
                although `must_be_finite` is true.
        """
        if self.verbose:
            print(f"Measuring the error of attention {when}")
        total = {name: 0 for name in QUANTITIES}
        batches = progress(list(self.batches.first(HEAD)), self.verbose)
        for step, _ in enumerate(batches):
            inputs = self.batches.with_noise(step, len(self.layers) + 1)
            inputs["noise"][:] = 1  # no window is left out

            def errors(x, noise=inputs["noise"]):
                return self.stage.predict_on_batch({"x": x, "noise": noise})

            with Interrupts().held():
                found = run(self.stage.model, inputs["x"], errors)
            bad = ~np.all(np.isfinite(found["squared"]), axis=(0, 2))
            if must_be_finite and np.any(bad):
                raise ValueError(
                    "Attention outputs must be finite. Received: outputs that are not "
                    f"finite in {self._paths(bad)}, batch {step}. Check `data` and "
                    "weights for NaN, and tokens for out-of-vocabulary ids."
                )
            total = {k: x + found[k].sum(0, keepdims=True) for k, x in total.items()}
        blind = ~np.any(total["rows"] > 0, axis=(0, 2))
        if np.any(blind):
            raise ValueError(
                "`data` must hold a real token for every linear layer. Received: "
                "only padding, or a model that does not call every layer, at "
                f"{self._paths(blind)}."
            )
        found = (keras.ops.convert_to_numpy(x) for x in relative(total))
        error, _, control, heads = found
        return tuple(np.where(heads > 0, x, np.nan) for x in (error, control))

    def _paths(self, chosen):
        return [self.layers[i].path for i in np.flatnonzero(chosen)][:3]
