"""Setting what feature maps learn from data, without training."""

import keras
import numpy as np

from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.attention import check_model
from keras_rfattn.layers.attention import title

MAX_TOKENS = 1024


def calibrate(model, data, max_tokens=MAX_TOKENS):
    """Measures what feature maps need to know of their data, and stores it.

    Causal and cross attention may not look at the sequence at hand, so that FAVOR++
    starts as FAVOR+ there, and other maps (`"gerf"`, `"poisson"`,
    `"favorpp_dense"`) learn in no other way. A few batches of real inputs are
    enough; the result is saved with the model. What was measured before is replaced.

    Args:
        model: A model with linear attention.
        data: An iterable of batches, each what `model(batch)` takes.
        max_tokens: How many queries and keys of a sequence are used at most, evenly
            spread; they are held in memory for all layers.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If nothing in it learns from data, or `data` is empty.
    """
    check_model(model)
    layers = [x for x in model._flatten_layers() if isinstance(x, LinearAttention)]
    layers = [x for x in layers if x.feature_map.is_adaptive]
    if not layers:
        raise ValueError(
            "`model` has no feature map that learns from data. Received: "
            f"{title(model)}. Replace attention with 'favorpp' first."
        )
    recorders = [Recorder(layer.feature_map, max_tokens) for layer in layers]
    for layer, recorder in zip(layers, recorders, strict=True):
        layer.recorder = recorder
    try:
        for batch in data:
            model(batch, training=False)
    finally:
        for layer in layers:
            del layer.recorder
    if not any(recorder.samples for recorder in recorders):
        raise ValueError(
            "`data` must hold at least one batch with a real token. Received: none."
        )
    for layer, recorder in zip(layers, recorders, strict=True):
        if recorder.samples:
            layer.feature_map.adapt(recorder.samples)
    return model


class Recorder:
    """Collects the scaled queries and keys that meet in one attention layer."""

    def __init__(self, feature_map, max_tokens=MAX_TOKENS):
        self.num_heads = feature_map.num_heads
        self.max_tokens = max_tokens
        self.samples = []

    def __call__(self, query, key, query_mask=None, key_mask=None):
        """Adds a batch: `(B, T, N, H)`, `(B, S, K, H)` and padding masks."""
        queries = self._sequences(query, query_mask)
        keys = self._sequences(key, key_mask)
        for q, k in zip(queries, keys, strict=True):
            if q.shape[1] and k.shape[1]:
                self.samples.append((q, k))

    def _sequences(self, x, mask):
        x = keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
        batch, length, num_heads, dim = x.shape
        mask = np.ones((batch, length), bool) if mask is None else np.asarray(
            keras.ops.convert_to_numpy(mask), bool
        )  # fmt: skip
        for tokens, real in zip(x, mask, strict=True):
            tokens = tokens[real]
            step = max(1, -(-len(tokens) // self.max_tokens))
            tokens = tokens[::step].reshape(
                -1, self.num_heads, num_heads // self.num_heads, dim
            )
            tokens = tokens.transpose(1, 0, 2, 3).reshape(self.num_heads, -1, dim)
            yield tokens.astype("float64")
