"""Reports the attention of each layer of a model (`describe_attention`)."""

import math
import textwrap
from dataclasses import dataclass, replace
from functools import partial

import keras
import numpy as np
from keras.backend import standardize_dtype

import keras_rfattn.models.generation as generation
from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_sizes
from keras_rfattn.feature_maps.weights import trained_weights
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.decoding import empty_state
from keras_rfattn.layers.linear_attention import sliding_window, soft_cap
from keras_rfattn.models.carried import empty_keys_and_values, sums_up
from keras_rfattn.models.survey import survey
from keras_rfattn.models.swap import original_class

NOT_TRAINED, UNCALIBRATED = "not trained", "uncalibrated"
# Functions that other folders add. Each takes a model and returns a list of lines that
# tell its users what they can call or expect.
ADVISERS = []
LENGTH = 8192  # tokens of a state, where a model has no maximum
LINE = 100  # characters of a printed line, unless a layer's path alone is longer
CAUSAL = {True: "causal", False: "bidirectional", None: "causal if a call says so"}


@dataclass(frozen=True)
class Row:
    """One attention layer in an `AttentionReport`."""

    path: str  # layer names from the model (excluded) to this layer, joined by `/`
    original_class: str  # name of the softmax class
    causal: bool | None  # `None` if each call decides
    mechanism: str = "softmax"  # or the registered name of the feature map
    width: int | None = None  # number of features, `None` for softmax and exact maps
    parameters_added: int = 0  # those that the feature map owns
    # Length in tokens above which linear attention takes fewer operations than softmax,
    # `None` wherever `width` is.
    crossover: int | None = None
    notes: tuple = ()  # why the layer was kept softmax, or remarks on its map
    window: int | None = None  # tokens of the window because of which it was kept
    # Bytes that the layer keeps of one row while the model generates, and what it would
    # keep with softmax attention; `None` if the model does not generate with states.
    state_bytes: int | None = None
    cache_bytes: int | None = None

    @property
    def note(self):
        """The notes as one text."""
        return ", ".join(self.notes)

    def __str__(self):
        texts = [
            self.mechanism,
            f"width {self.width}" if self.width is not None else "",
            CAUSAL[self.causal],
            self.original_class,
            *self.notes,
            _memory(self),
        ]
        return ", ".join(x for x in texts if x)


@dataclass(frozen=True)
class AttentionReport:
    """All attention layers of a model; prints those that are alike together.

    Attributes:
        model: Class and name of the model.
        rows: Tuple of `Row`, one for each attention layer.
        max_length: Maximum length of inputs in tokens, or `None` if it is not known.
        length: Number of tokens of one row for which `rows` count bytes.
        dtype: Compute dtype of the model.
        advice: Lines that say what to call next.
    """

    model: str
    rows: tuple
    max_length: int | None = None
    length: int = LENGTH
    dtype: str = "float32"
    advice: tuple = ()

    @property
    def replaced(self):
        """The rows of layers with linear attention."""
        return tuple(row for row in self.rows if row.mechanism != "softmax")

    @property
    def kept(self):
        """The rows of layers with softmax attention."""
        return tuple(row for row in self.rows if row.mechanism == "softmax")

    @property
    def local(self):
        """The rows of `kept` that are local because of a sliding window."""
        return tuple(row for row in self.rows if row.window is not None)

    @property
    def parameters_added(self):
        """Total number of parameters that the feature maps own."""
        return sum(row.parameters_added for row in self.rows)

    @property
    def state_bytes(self):
        """Total of the rows' `state_bytes`."""
        return sum(row.state_bytes or 0 for row in self.rows)

    @property
    def cache_bytes(self):
        """Total of the rows' `cache_bytes`."""
        return sum(row.cache_bytes or 0 for row in self.rows)

    @property
    def crossover(self):
        """Length in tokens above which all linear layers save operations, or `None`."""
        crossovers = [x.crossover for x in self.replaced if x.crossover is not None]
        return max(crossovers, default=None)

    @property
    def is_short(self):
        """Whether the model takes too few tokens to gain from linear attention."""
        known = self.crossover is not None and self.max_length is not None
        return known and self.max_length <= self.crossover

    def __str__(self):
        counts = f"{len(self.replaced)} of {len(self.rows)} layers linear"
        counts += f", {len(self.local)} local already" * bool(self.local)
        counts += f", {self.parameters_added:,} parameters added" * bool(self.replaced)
        operations = f"fewer operations than softmax above {self.crossover} tokens"
        if self.is_short:
            operations = f"Warning: {operations}, but the model takes {self.max_length}"
        lines = [
            f"Attention of {self.model}: {counts}",
            operations if self.crossover is not None else "",
            _memory(self, f"one row of {self.length} tokens in {self.dtype}: "),
            *self.advice,
        ]
        alike = {}
        for row in (*self.replaced, *self.kept):
            alike.setdefault(str(row), []).append(f"  {row.path}")
        for text, paths in alike.items():
            lines += [text, *paths]
        return "\n".join(part for line in lines for part in _wrapped(line))

    __repr__ = __str__


def _wrapped(line):
    return textwrap.wrap(
        line, LINE, subsequent_indent="    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _memory(counted, words=""):
    """Returns text on the bytes of a `Row` or report; empty if they are unknown."""
    if not counted.cache_bytes:
        return ""
    state, cache = counted.state_bytes / 1e6, counted.cache_bytes / 1e6
    return f"{words}state {state:.3g} MB, softmax's cache {cache:.3g} MB"


def describe_attention(
    model: keras.layers.Layer, length: int | None = None
) -> AttentionReport:
    """Reports the attention of a model, whether original, replaced or reloaded.

    For tasks that generate with linear attention, the report has the bytes of the state
    of each layer (batch size 1, in the model's own dtypes), beside those of the keys
    and values that softmax attention would keep.

    Args:
        model: A Keras model or layer.
        length: Number of tokens, prompt included, for which bytes are counted. `None`
            takes the model's maximum length, or 8192.

    Returns:
        An `AttentionReport`, which prints layers that are alike together.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If `model` is not built, or `length` is not a positive integer.
    """
    check_model(model)
    sites = survey(model)
    declared = getattr(getattr(model, "backbone", model), "max_sequence_length", None)
    fixed = declared if isinstance(declared, int) else _fixed_length(model, sites)
    length = (fixed or LENGTH) if length is None else length
    check_sizes(length=length)
    rows = map(_row, sites)
    if generation.keeps_states(model, sites):
        rows = [
            _with_bytes(row, site, length) if generation.decodes(site) else row
            for row, site in zip(rows, sites, strict=True)
        ]
    facts = title(model), tuple(rows), fixed, length, model.compute_dtype
    report, advice = AttentionReport(*facts), []
    if any(NOT_TRAINED in row.notes for row in rows):
        advice = ["To train the maps: `keras_rfattn.uptrain(model, data, steps=...)`."]
    elif any(UNCALIBRATED in row.notes for row in rows):
        advice = ["To calibrate the maps: `keras_rfattn.calibrate(model, data)`."]
    if declared == fixed and report.is_short:
        advice.append(
            "For longer inputs: `keras_rfattn.extend_positions(model, length)`."
        )
    advice += [x for ask in ADVISERS for x in ask(model)]
    return replace(report, advice=tuple(advice))


def _fixed_length(model, sites):
    """Returns the number of tokens that a model's inputs fix, `None` if they do not."""
    if getattr(model, "inputs", None) is None:
        # Layers of a subclassed model were built for its first call alone.
        return None
    shapes = [getattr(x.layer, "_build_shapes_dict", None) or {} for x in sites]
    lengths = {x["query_shape"][1] for x in shapes if "query_shape" in x}
    return lengths.pop() if len(lengths) == 1 else None


def _row(site):
    layer, name = site.layer, original_class(site.layer).__name__
    if not site.is_linear:
        reason = local_note(site) or site.reason or "not selected"
        if site.block.is_pooling:
            reason = "one query, for which softmax is already linear"
        notes = (f"kept: {reason}",)
        return Row(site.path, name, site.causal, notes=notes, window=site.window)
    feature_map = layer.feature_map
    return Row(
        site.path,
        name,
        site.causal,
        feature_maps.name_of(feature_map),
        None if feature_map.is_exact else feature_map.output_dim,
        sum(math.prod(w.shape) for w in feature_map.weights),
        crossover(layer),
        _notes(site),
    )


def _with_bytes(row, site, length):
    """Returns the `Row` of a causal layer with its bytes for `length` tokens."""
    cache = partial(empty_keys_and_values, site)
    state = partial(empty_state, site.layer) if sums_up(site) else cache
    sizes = {"state_bytes": _size(state, length), "cache_bytes": _size(cache, length)}
    return replace(row, **sizes)


def _size(allocate, length):
    """Returns the bytes of arrays for `length` tokens, which it does not allocate."""
    small, larger = (
        sum(
            math.prod(x.shape) * np.dtype(standardize_dtype(x.dtype)).itemsize
            for x in keras.tree.flatten(allocate(1, tokens))
        )
        for tokens in (1, 2)
    )
    return small + (length - 1) * (larger - small)


def local_note(site):
    """Returns text on the sliding window of a softmax layer; empty if it is global."""
    if site.window is None:
        return ""
    return f"local already, linear in length (sliding window of {site.window} tokens)"


def crossover(layer):
    """Computes the length above which linear attention takes fewer operations."""
    feature_map = layer.feature_map
    if feature_map.is_exact:
        return None
    num_heads, head_dim = layer._kv_shape()
    value_dim = getattr(layer, "_value_dim", head_dim)
    # Multiplications of one linear head for each token.
    cost = head_dim * feature_map.num_projections + feature_map.output_dim * value_dim
    # Heads that stay softmax save nothing at any length.
    share = 1 - len(layer.options.softmax_heads) / num_heads
    return math.ceil(2 * cost / (share * (head_dim + value_dim)))


def _notes(site):
    """Returns remarks on the map of a linear layer, and on what it leaves out."""
    layer, feature_map, options = site.layer, site.layer.feature_map, site.layer.options
    notes = [feature_map.status(site.causal)]
    if trained_weights(feature_map):
        notes = ["trained"] if feature_map.was_trained else [*notes, NOT_TRAINED]
    if feature_map.is_exact:
        notes.append("quadratic in length")
    elif options.window is not None:
        text = f"exact within {options.window} tokens"
        beside = "window before" if site.causal else "windows beside"
        text += f" and the {beside}" * options.sliding
        notes.append(text + f", and to the first {options.sinks}" * bool(options.sinks))
    if options.temperature is not None:
        notes.append(f"normalized, temperature {options.temperature:g}")
    if options.softmax_heads:
        heads, count = options.softmax_heads, feature_map.num_heads
        which = ", ".join(map(str, heads))
        notes.append(f"{len(heads)} of {count} key/value heads softmax ({which})")
    dropped = sliding_window(layer), soft_cap(layer)
    names = "sliding window of {:g} tokens dropped", "soft cap of {:g} dropped"
    notes += [x.format(n) for x, n in zip(names, dropped, strict=True) if n is not None]
    rate = getattr(layer, "_dropout", 0) or getattr(layer, "dropout", 0)
    if isinstance(rate, (int, float)) and rate:
        notes.append(f"attention dropout {rate:g} inactive")
    if options.asks_for_kernels:
        notes.append(f"computed by {options.implementation} as asked")
    return tuple(x for x in notes if x)
