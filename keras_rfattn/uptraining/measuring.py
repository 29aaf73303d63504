"""The errors of attention layers, before training and after it."""

import keras
import numpy as np

from keras_rfattn.layers.recording import progress
from keras_rfattn.layers.recording import run
from keras_rfattn.uptraining.attention import QUANTITIES
from keras_rfattn.uptraining.attention import AttentionStage
from keras_rfattn.uptraining.attention import relative
from keras_rfattn.uptraining.data import HEAD
from keras_rfattn.uptraining.interrupts import Interrupts


class Measuring:
    """Measures layers of a model on the first batches of the data.

    It has a Keras model of its own, which is compiled once: whatever trains is
    compiled again and would forget it.

    Args:
        teacher: `Teacher`.
        layers: Linear attention layers.
        batches: `Batches`.
        verbose: As in Keras.
    """

    def __init__(self, teacher, layers, batches, verbose):
        self.layers, self.batches, self.verbose = layers, batches, verbose
        self.stage = AttentionStage(teacher, layers)

    def __call__(self, when, must_be_finite=False):
        """`(errors of heads, those of the mean of V)`, arrays `(L, N)`.

        They are NaN for heads that a layer lacks and other layers have.

        Args:
            when: Text for the line before the progress bar.
            must_be_finite: Whether an error that is not finite is refused.

        Raises:
            ValueError: If a layer meets no real token, or an error is not finite and
                must be.
        """
        if self.verbose:
            print(f"Measuring the error of attention {when}")
        total = {name: 0 for name in QUANTITIES}
        batches = progress(list(self.batches.first(HEAD)), self.verbose)
        for step, _ in enumerate(batches):
            inputs = self.batches.with_noise(step, len(self.layers) + 1)
            inputs["noise"][:] = 1  # leaves no window out

            def errors(x, noise=inputs["noise"]):
                return self.stage.predict_on_batch({"x": x, "noise": noise})

            with Interrupts().held():
                found = run(self.stage.model, inputs["x"], errors)
            bad = ~np.all(np.isfinite(found["squared"]), axis=(0, 2))
            if must_be_finite and np.any(bad):
                raise ValueError(
                    "`data` and weights must be finite, and so must what attention "
                    f"puts out. Received: outputs that are not finite, of "
                    f"{self._paths(bad)} in batch {step}. Look for NaN, or for tokens "
                    "beyond the vocabulary."
                )
            total = {k: x + found[k].sum(0, keepdims=True) for k, x in total.items()}
        blind = ~np.any(total["rows"] > 0, axis=(0, 2))
        if np.any(blind):
            raise ValueError(
                "`data` must hold a real token for every linear layer. Received: "
                "padding alone, or a model that does not call all of them, at "
                f"{self._paths(blind)}."
            )
        found = (keras.ops.convert_to_numpy(x) for x in relative(total))
        error, _, control, heads = found
        return tuple(np.where(heads > 0, x, np.nan) for x in (error, control))

    def _paths(self, chosen):
        return [self.layers[i].path for i in np.flatnonzero(chosen)][:3]
