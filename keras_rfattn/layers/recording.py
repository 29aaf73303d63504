"""Records the queries, keys and values of a model's attention layers."""

import contextlib
import functools
import itertools
from typing import NamedTuple

import keras
import numpy as np

from keras_rfattn.arguments import check_choice, check_sizes
from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.call_context import Interceptor
from keras_rfattn.layers.linear_attention import LinearAttention


def progress(items, verbose):
    """Yields `items` and shows Keras' progress bar."""
    check_choice("verbose", verbose, ("auto", 0, 1, 2))
    total = len(items) if hasattr(items, "__len__") else None
    bar = keras.utils.Progbar(total, verbose=1 if verbose == "auto" else verbose)
    done = 0
    try:
        for item in items:
            yield item
            done += 1
            bar.update(done, finalize=False)
    finally:
        # In `finally`, because the caller's loop may end early.
        if done:
            bar.update(done, finalize=True)


def run(model, batch, function=None):
    """Returns what a model, or a function of the batch, computes without gradients."""
    try:
        with without_gradients():
            if function is None:
                return model(batch, training=False)
            return function(batch)
    except Exception as error:
        raise _refusal(model, batch, error) from error


class Sequence(NamedTuple):
    """The real tokens of one sequence in one layer, as float64 NumPy arrays."""

    # K key/value heads, T queries, S keys; the G query heads of a token are adjacent.

    query: np.ndarray  # (K, T · G, H), scaled; not prepared by the map
    key: np.ndarray  # (K, S, H), as the queries
    value: np.ndarray  # (K, S, V)
    causal: bool
    logit_scale: float = 1.0  # turns `query · key` into a logit of softmax attention
    # With the option `temperature`, queries and keys above are normalized, and these
    # are those of softmax attention.
    softmax: tuple | None = None
    prefix: np.ndarray | None = None  # (S,), true for keys that every query sees
    soft_cap: float | None = None  # bounds the logits of softmax attention


class Recorder(Interceptor):
    """Collects the `Sequence`s of a layer; `called` holds recorders as layers run."""

    def __init__(self, layer, exact, max_tokens, called):
        self.num_heads, _ = layer._kv_shape()
        self.layer, self.exact, self.max_tokens = layer, exact, max_tokens
        self.sequences, self.called = [], called

    def __call__(self, call):
        """Adds the sequences of a batch; see `Interceptor`."""
        self.called[id(self)] = self
        query, key = call.scaled()
        scale, plain = call.logit_scale, (None, None)
        if call.options.temperature is not None:
            local, plain = call.local(*call.prepared()), (scale * query, key)
            query, key, scale = local.query, local.key, 1.0
        query_mask, key_mask = call.query_mask, call.mask.key_mask
        rows = zip(
            self._tokens(query, query_mask),
            self._tokens(key, key_mask),
            self._tokens(plain[0], query_mask),
            self._tokens(plain[1], key_mask),
            self._tokens(call.value, key_mask),
            self._prefixes(call),
            strict=False,
        )
        causal, cap = call.mask.causal, call.softmax_kernel.soft_cap
        for q, k, plain_q, plain_k, v, prefix in rows:
            if q.shape[1] and k.shape[1]:
                softmax = None if plain_q is None else (plain_q, plain_k)
                self.sequences.append(
                    Sequence(q, k, v, causal, scale, softmax, prefix, cap)
                )
        return call.softmax() if self.exact else None

    def _tokens(self, x, mask):
        """Yields evenly spaced real tokens of each row, as `(K, n · G, ·)`."""
        if x is None:
            yield from itertools.repeat(None)
        for row in self._real(x, mask):
            groups = row.shape[1] // self.num_heads
            row = row.reshape(len(row), self.num_heads, groups, row.shape[-1])
            row = row.transpose(1, 0, 2, 3)
            row = row.reshape(self.num_heads, -1 if row.size else 0, row.shape[-1])
            yield row.astype("float64")

    def _prefixes(self, call):
        """Yields for each row which of the kept keys belong to the prefix."""
        prefix = call.mask.prefix_mask
        if prefix is None:
            return itertools.repeat(None, len(call.key))
        found = self._real(prefix, call.mask.key_mask)
        return (row.astype(bool) for row in found)

    def _real(self, x, mask):
        """Yields the entries of evenly spaced real tokens, row by row."""
        x = keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
        real = np.ones(x.shape[:2], bool)
        if mask is not None:
            real = keras.ops.convert_to_numpy(mask).astype(bool)
        for row, kept in zip(x, real, strict=True):
            row = row[kept]
            yield row[:: max(1, -(-len(row) // self.max_tokens))]


@contextlib.contextmanager
def recording(recorders):
    """Context manager that sets the `recorder` of layers."""
    try:
        for layer, recorder in recorders:
            layer.recorder = recorder
        yield
    finally:
        for layer, _ in recorders:
            vars(layer).pop("recorder", None)


def linear_layers(model):
    """Returns the linear attention layers of a model, in no particular order."""
    return [x for x in model._flatten_layers() if isinstance(x, LinearAttention)]


def in_order(model, layers, batch):
    """Sorts attention layers by when a batch reaches them; unreached ones are last."""
    met = {}

    def meet(layer, call):
        met[id(layer)] = layer
        # The output does not matter, and zeros cost nothing.
        return call.zero()

    with recording([(x, functools.partial(meet, x)) for x in layers]):
        run(model, batch)
    return [*met.values(), *(x for x in layers if id(x) not in met)]


def record(model, data, exact=True, max_tokens=1024, verbose=0):
    """Runs a model and records the inputs of its linear attention layers.

    Args:
        model: A model with linear attention. It runs outside of compiled functions.
        data: An iterable of batches, each of which `model(batch)` accepts.
        exact: Whether the layers compute softmax attention during the run, so that
            deeper layers receive the same inputs as in the softmax model. This takes
            memory quadratic in the sequence length. Defaults to `True`.
        max_tokens: Maximum number of queries and of keys that are kept of a sequence,
            evenly spaced. Defaults to 1024.
        verbose: 0 (default), 1, 2 or `"auto"`, as in Keras.

    Returns:
        List of `(path, layer, sequences)`, one for each linear attention layer that
        received a real token, in the order in which layers are called. `sequences` is a
        list of `Sequence`s.
    """
    check_sizes(max_tokens=max_tokens)
    check_batches(data)
    layers = linear_layers(model)
    called = {}
    recorders = [(x, Recorder(x, exact, max_tokens, called)) for x in layers]
    with recording(recorders):
        for batch in progress(data, verbose):
            run(model, batch)
    found = [x for x in called.values() if x.sequences]
    return [(x.layer.path, x.layer, x.sequences) for x in found]


# --- Batches of data


def check_batches(data):
    """Raises `ValueError` if `data` cannot be an iterable of batches."""
    is_iterable = hasattr(data, "__iter__") and getattr(data, "shape", None) != ()
    if isinstance(data, dict) or is_text(data) or not is_iterable:
        raise ValueError(
            "`data` must be an iterable of batches for which `model(batch)` works. "
            f"Received: {described(data)}. Put a single batch into a list, `[batch]`, "
            "call a function that makes batches, and turn texts into tokens first."
        )


def _refusal(model, batch, error):
    """Returns a `ValueError` that describes the batch on which a model failed."""
    inputs = getattr(model, "input", None) if hasattr(model, "inputs") else None
    wanted = "" if inputs is None else f", {described(inputs)}"
    hint = "Leave labels out. Pass a single batch as the list `[array]`."
    if any(map(is_text, keras.tree.flatten(batch))):
        hint = "Turn texts into tokens first, by the model's preprocessor or tokenizer."
    return ValueError(
        f"Each batch of `data` must be an input of the model{wanted}. Received: "
        f"{described(batch)}. The model raised {type(error).__name__}: "
        f"{str(error).strip()} {hint}"
    )


def is_text(x):
    """Whether x is a string, or an array that holds only strings."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "O":
        return all(isinstance(i, (str, bytes)) for i in x.flat)
    dtype = str(getattr(x, "dtype", ""))
    return isinstance(x, (str, bytes)) or any(k in dtype for k in ("string", "U", "S"))


def described(x):
    """Returns the type of an object and the shapes in it, for error messages."""
    shapes = [tuple(a.shape) for a in keras.tree.flatten(x) if hasattr(a, "shape")]
    names = f" of {', '.join(map(repr, x))}" if isinstance(x, dict) else ""
    kind = f"{type(x).__name__}{names}"
    return f"{kind} with shapes {shapes}" if shapes else f"{x!r:.80} of type {kind}"
