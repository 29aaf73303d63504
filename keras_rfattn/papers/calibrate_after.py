"""Calibrates a model in the middle of `fit`: the delayed clustering of HRF-C."""

from collections.abc import Callable, Iterable

import keras

from keras_rfattn.arguments import check_sizes
from keras_rfattn.uptraining.calibrate import adaptive_layers, calibrate
from keras_rfattn.uptraining.weights import paths


class CalibrateAfter(keras.callbacks.Callback):
    """Callback that calibrates a model once during `fit(callbacks=[...])`.

    Before that step the maps keep their parameters. Afterwards the calibrated
    parameters stay fixed while everything else continues to train. With
    `"hybrid_clustered"` this is the delayed clustering of the paper's speech models:
    queries and keys of the first steps have no clusters worth finding.

    Args:
        data: Batches for `calibrate`, or a function without arguments that returns
            them; the function is called when the calibration starts.
        steps: Number of batches, counted from the first one of `fit`, after which the
            model is calibrated.
        **kwargs: Further arguments of `calibrate`.

    Raises:
        ValueError: If `steps` is not a positive integer. When training begins: if no
            map in the model learns from data, or if a map was trained or has weights
            that would train until the calibration.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), section 4.3, HRF-C.

    Examples:
        >>> from keras_rfattn.papers.calibrate_after import CalibrateAfter
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorpp")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> model.compile("sgd", "mse")
        >>> callbacks = [CalibrateAfter([x], steps=1)]
        >>> history = model.fit(x, x, verbose=0, callbacks=callbacks)
        >>> keras_rfattn.describe_attention(model).rows[0].note
        'calibrated'
    """

    def __init__(self, data: Iterable | Callable, steps: int, **kwargs) -> None:
        super().__init__()
        check_sizes(steps=steps)
        self.data, self.steps, self.kwargs = data, steps, {"verbose": 0, **kwargs}
        self.seen = 0

    def on_train_begin(self, logs=None):
        layers = adaptive_layers(self.model)
        self.seen = 0
        maps = [(x, x.feature_map) for x in layers]
        learning = [x for x, m in maps if m.was_trained or m.trainable_variables]
        if learning:
            raise ValueError(
                "`CalibrateAfter` must not replace trained weights. Received: "
                f"steps={self.steps}, and feature maps of {paths(learning)} that were "
                "trained, or train until then. Call `keras_rfattn.calibrate` before "
                "`fit`, or freeze these maps."
            )

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.steps:
            data = self.data() if callable(self.data) else self.data
            calibrate(self.model, data, **self.kwargs)
