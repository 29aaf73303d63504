"""Watching a model's queries, keys and values at work."""

import contextlib
import itertools
from typing import NamedTuple

import keras
import numpy as np

from keras_rfattn.layers.batches import check_batches
from keras_rfattn.layers.batches import is_text
from keras_rfattn.layers.batches import refusal
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.ops.gradients import without_gradients


def progress(items, verbose):
    """Iterates over `items` under Keras' progress bar; `verbose` as in Keras."""
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(
            f"`verbose` must be 'auto', 0, 1 or 2. Received: verbose={verbose!r}."
        )
    total = len(items) if hasattr(items, "__len__") else None
    bar = keras.utils.Progbar(total, verbose=1 if verbose == "auto" else verbose)
    done = 0
    try:
        for item in items:
            yield item
            done += 1
            bar.update(done, finalize=False)
    finally:
        # Also where the loop over it ends early.
        if done:
            bar.update(done, finalize=True)


def run(model, batch, function=None, data=None):
    """The model on one batch, or `ValueError` that says what a batch must be.

    Args:
        model: A model.
        batch: What it is given.
        function: What is done with the batch, `model(batch)` if `None`.
        data: What the batch is from, for the error; `None` if that is of no use.
    """
    if any(map(is_text, keras.tree.flatten(batch))):
        raise refusal(model, batch, data=data)
    try:
        with without_gradients():
            if function is None:
                return model(batch, training=False)
            return function(batch)
    except Exception as error:
        raise refusal(model, batch, error, data) from error


class Sequence(NamedTuple):
    """The real tokens of one sequence in one attention layer, float64 NumPy arrays.

    Attributes:
        query: Scaled queries, before a normalization of the map's own, `(K, T · G,
            H)`, groups beside their token.
        key: Keys likewise, `(K, S, H)`.
        value: `(K, S, V)`.
        causal: Whether query i sees keys `j <= i` only.
        logit_scale: What `query · key` is a softmax logit times; 1 for maps that
            estimate softmax, as their scale is softmax's.
        softmax: Queries and keys as softmax attention has them, where features are of
            normalized ones; `None` where `query` and `key` are those.
        prefix: `(S,)`, which keys queries before them see too (prefix-LM); `None` for
            none.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    causal: bool
    logit_scale: float = 1.0
    softmax: tuple | None = None
    prefix: np.ndarray | None = None


class Recorder:
    """Collects `Sequence`s; the layer goes on with softmax if `exact`."""

    def __init__(self, layer, exact, max_tokens):
        self.num_heads, _ = layer._kv_shape()
        self.exact, self.max_tokens = exact, max_tokens
        self.sequences = []

    def __call__(self, call):
        """Adds a batch, of an `Attention`."""
        key_mask, causal = call.mask.key_mask, call.mask.causal

        def tokens(query, key):
            queries = self._tokens(query, call.query_mask)
            return zip(queries, self._tokens(key, key_mask), strict=True)

        given, scale = tokens(*call.scaled()), call.logit_scale
        found = [(*x, scale, None) for x in given]
        if call.options.temperature is not None:
            prepared = tokens(*call.prepared()[:2])
            found = [
                (*x, 1.0, (scale * q, k))
                for x, (q, k, *_) in zip(prepared, found, strict=True)
            ]
        values = self._tokens(call.value, key_mask)
        prefixes = self._prefixes(call)
        for (q, k, *how), v, prefix in zip(found, values, prefixes, strict=True):
            if q.shape[1] and k.shape[1]:
                self.sequences.append(Sequence(q, k, v, causal, *how, prefix))
        return call.softmax() if self.exact else None

    def _tokens(self, x, mask):
        """The real tokens of each row, evenly thinned, as `(K, n · G, ·)`."""
        for row in self._real(x, mask):
            groups = row.shape[1] // self.num_heads
            row = row.reshape(len(row), self.num_heads, groups, row.shape[-1])
            row = row.transpose(1, 0, 2, 3)
            row = row.reshape(self.num_heads, -1 if row.size else 0, row.shape[-1])
            yield row.astype("float64")

    def _prefixes(self, call):
        """Which of the kept keys are of the prefix, row by row."""
        prefix = call.mask.prefix_mask
        if prefix is None:
            return itertools.repeat(None, len(call.key))
        found = self._real(prefix, call.mask.key_mask)
        return (row.astype(bool) for row in found)

    def _real(self, x, mask):
        """What belongs to the real tokens of each row, evenly thinned."""
        x = keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
        real = np.ones(x.shape[:2], bool)
        if mask is not None:
            real = keras.ops.convert_to_numpy(mask).astype(bool)
        for row, kept in zip(x, real, strict=True):
            row = row[kept]
            yield row[:: max(1, -(-len(row) // self.max_tokens))]


@contextlib.contextmanager
def recording(recorders):
    """Sets the `recorder` of layers meanwhile; `recorders` are `(layer, recorder)`."""
    try:
        for layer, recorder in recorders:
            layer.recorder = recorder
        yield
    finally:
        for layer, _ in recorders:
            vars(layer).pop("recorder", None)


def linear_layers(model):
    """The linear attention layers of a model, in no particular order."""
    return [x for x in model._flatten_layers() if isinstance(x, LinearAttention)]


def in_order(model, layers, batch):
    """Attention layers in the order in which a batch meets them, others last."""
    met = {}

    def meeting(layer):
        def recorder(call):
            met[id(layer)] = layer
            # Any output does, and this one costs nothing.
            return call.zero()

        return recorder

    with recording([(x, meeting(x)) for x in layers]):
        run(model, batch)
    return [*met.values(), *(x for x in layers if id(x) not in met)]


def record(model, data, exact=True, max_tokens=1024, verbose=0):
    """Runs a model on data and keeps what its linear attention layers meet.

    Args:
        model: A model with linear attention, run outside of any compiled function.
        data: An iterable of batches, each what `model(batch)` takes.
        exact: Whether layers compute softmax attention meanwhile, so that deeper ones
            meet what they meet in the softmax model. Takes memory quadratic in the
            length of a batch.
        max_tokens: How many queries and keys of a sequence are kept at most, evenly
            spread.
        verbose: 0 for silence, 1 or `"auto"` for a progress bar, 2 for a line at the
            end, as in Keras.

    Returns:
        List of `(path, layer, sequences)`, one for each linear attention layer that
        met a real token.

    Raises:
        ValueError: If `max_tokens` is not a positive integer, `data` is not an
            iterable of batches, or the model cannot take one.
    """
    is_integer = isinstance(max_tokens, (int, np.integer))
    if not is_integer or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(
            "`max_tokens` must be a positive integer. "
            f"Received: max_tokens={max_tokens!r}."
        )
    check_batches(data)
    layers = linear_layers(model)
    recorders = [Recorder(x, exact, max_tokens) for x in layers]
    with recording(list(zip(layers, recorders, strict=True))):
        for batch in progress(data, verbose):
            run(model, batch, data=data)
    return [
        (layer.path, layer, recorder.sequences)
        for layer, recorder in zip(layers, recorders, strict=True)
        if recorder.sequences
    ]
