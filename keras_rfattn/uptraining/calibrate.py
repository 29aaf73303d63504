"""Setting what feature maps learn from data, without training."""

import keras
import numpy as np

from keras_rfattn.layers import record
from keras_rfattn.layers.checks import check_model
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import linear_layers


class CalibrateAfter(keras.callbacks.Callback):
    """Calibrates a model once in the middle of training, for `fit(callbacks=[...])`.

    Until then maps are what they were; afterwards what they measured stays as it is,
    while all else trains on. With `"hybrid_clustered"` that is the delayed clustering
    of the paper's speech models: queries and keys of the first steps have no clusters
    worth finding.

    Args:
        data: As of `calibrate`; a callable that gives it is called when it is time.
        steps: After how many batches, counted from the first of `fit`.
        **kwargs: Further arguments of `calibrate`.

    Raises:
        ValueError: If `steps` is not a positive integer; and, once training begins,
            if nothing in the model learns from data.

    Reference:
        Choromanski et al., "Hybrid Random Features" (2022), section 4.3, HRF-C.
    """

    def __init__(self, data, steps, **kwargs):
        super().__init__()
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"`steps` must be a positive integer. Received: steps={steps!r}."
            )
        self.data, self.steps, self.kwargs = data, steps, {"verbose": 0, **kwargs}
        self.seen = 0

    def on_train_begin(self, logs=None):
        _check_adaptive(self.model)
        self.seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.steps:
            data = self.data() if callable(self.data) else self.data
            calibrate(self.model, data, **self.kwargs)


def calibrate(model, data, exact=True, max_tokens=1024, verbose="auto"):
    """Measures what feature maps need to know of their data, and stores it.

    Causal and cross attention may not look at the sequence at hand, so that FAVOR++
    starts as FAVOR+ there, and other maps (`"gerf"`, `"poisson"`,
    `"favorpp_dense"`) learn in no other way. A few batches of real inputs are
    enough; the result is saved with the model. What was measured before is replaced.

    Args:
        model: A model with linear attention.
        data: An iterable of batches, each what `model(batch)` takes.
        exact: Whether the model runs with softmax attention meanwhile, so that every
            layer meets the activations of the softmax checkpoint. Takes memory
            quadratic in the length of a batch; `False` measures the linear model as
            it is.
        max_tokens: How many queries and keys of a sequence are used at most, evenly
            spread; they are held in memory for all layers.
        verbose: 0 for silence, 1 or `"auto"` for a progress bar, 2 for a line at the
            end, as in Keras.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If nothing in it learns from data, `data` is empty or not what the
            model takes, or a map cannot adapt to it; the model is unchanged then.
    """
    check_model(model)
    layers = _check_adaptive(model)
    found = record(model, data, exact, max_tokens, verbose)
    if not found:
        raise ValueError(
            "`data` must hold at least one batch with a real token. Received: none."
        )
    weights = [w for layer in layers for w in layer.feature_map.weights]
    before = [np.array(keras.ops.convert_to_numpy(w)) for w in weights]
    try:
        for _, layer, sequences in found:
            if layer.feature_map.is_adaptive:
                layer.feature_map.adapt([(s.query, s.key) for s in sequences])
    except Exception:
        # No model is left half calibrated.
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value)
        raise
    return model


def _check_adaptive(model):
    """The linear layers of a model, one of which at least learns from data."""
    layers = linear_layers(model)
    if not any(x.feature_map.is_adaptive for x in layers):
        raise ValueError(
            "`model` has no feature map that learns from data. Received: "
            f"{title(model)}. Replace attention with 'favorpp' first."
        )
    return layers
