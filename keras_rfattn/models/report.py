"""Reports the attention of each layer of a model (`describe_attention`)."""

import math
from dataclasses import dataclass, field

import keras

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.trained import trained_weights
from keras_rfattn.layers.checks import check_model, num_heads, title
from keras_rfattn.layers.implementation import told
from keras_rfattn.layers.linear_attention import sliding_window, soft_cap
from keras_rfattn.models.notes import notes_of
from keras_rfattn.models.survey import is_pooling, survey
from keras_rfattn.models.swap import original_class

NOT_TRAINED, UNCALIBRATED = "not trained", "uncalibrated"
# Functions that other folders add. Each takes a model and returns a list of lines that
# tell its users what to call next.
ADVISERS = []


@dataclass(frozen=True)
class Row:
    """One attention layer in an `AttentionReport`.

    Attributes:
        path: Layer names from the model (excluded) to this layer, joined by `/`.
        original_class: Name of the softmax class.
        mechanism: Registered name of the feature map, or "softmax".
        width: Number of features M. `None` for softmax and for maps that compute their
            kernel exactly.
        causal: Whether the attention is causal, or `None` if each call decides.
        parameters_added: Number of parameters that the feature map owns.
        crossover: Sequence length in tokens above which linear attention takes fewer
            operations than softmax. `None` wherever `width` is `None`.
        note: Why the layer was kept softmax, or remarks on its mechanism.
        implementation: Which implementation computes the layer, and why. `None` for
            softmax.
        window: Size in tokens of the sliding window because of which the layer was kept
            softmax. `None` for other layers.
    """

    path: str
    original_class: str
    mechanism: str
    width: int | None
    causal: bool | None
    parameters_added: int
    crossover: int | None
    note: str = ""
    implementation: str | None = None
    window: int | None = None


@dataclass(frozen=True)
class AttentionReport:
    """All attention layers of a model; prints as a table.

    Attributes:
        model: Class and name of the model.
        rows: Tuple of `Row`, one for each attention layer.
        max_length: Maximum sequence length of the model in tokens, or `None` if it is
            not known.
        others: Class and name of each other task that changed too, because it shares
            layers with the model.
        advice: Sentences that say what to call next.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> report = keras_rfattn.describe_attention(model)
        >>> [row.mechanism for row in report.rows], len(report.kept)
        (['favorplus'], 0)
    """

    model: str
    rows: tuple
    max_length: int | None = None
    others: tuple = field(default=())
    advice: tuple = field(default=())

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
        """The rows of layers that were kept because a sliding window makes them local.

        They are part of `kept`.
        """
        return tuple(row for row in self.rows if row.window is not None)

    @property
    def parameters_added(self):
        """Total number of parameters that the feature maps own."""
        return sum(row.parameters_added for row in self.rows)

    def __str__(self):
        head = ("layer", "class", "mechanism", "width", "causal", "added", "note")
        causal = {True: "yes", False: "no", None: "per call"}
        body = [
            (
                row.path,
                row.original_class,
                row.mechanism,
                "" if row.width is None else str(row.width),
                causal[row.causal],
                f"{row.parameters_added:,}",
                row.note,
            )
            for row in self.rows
        ]
        table = [head, *body]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]

        def render(line):
            pairs = zip(line, widths, strict=True)
            return "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()

        rule = "  ".join("-" * width for width in widths)
        lines = [f"Attention of {self.model}", render(head), rule]
        lines += [render(line) for line in body]
        lines += self._footer()
        return "\n".join(lines)

    def _footer(self):
        replaced, total = len(self.replaced), len(self.rows)
        counts = f"{replaced} of {total} layers linear"
        counts += f", {len(self.local)} local already" * bool(self.local)
        lines = [f"{counts}, {self.parameters_added:,} parameters added"]
        crossovers = [x.crossover for x in self.replaced if x.crossover is not None]
        if crossovers:
            crossover = max(crossovers)
            text = f"fewer operations than softmax above {crossover} tokens"
            if self.max_length is not None and self.max_length <= crossover:
                text += (
                    f", but the model takes {self.max_length} (see `extend_positions`)"
                )
            lines.append(text)
        programs = dict.fromkeys(x.implementation for x in self.replaced)
        lines += [f"computed by {x}" for x in programs]
        lines += [f"also changed, because it shares layers: {x}" for x in self.others]
        return lines + list(self.advice)

    __repr__ = __str__


def describe_attention(model: keras.layers.Layer) -> AttentionReport:
    """Reports the attention of a model, whether original, replaced or reloaded.

    Args:
        model: A Keras model or layer.

    Returns:
        An `AttentionReport`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If `model` is not built.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> report = keras_rfattn.describe_attention(model)
        >>> report.rows[0].mechanism, report.rows[0].original_class
        ('softmax', 'MultiHeadAttention')
    """
    check_model(model)
    backbone = getattr(model, "backbone", None) or model
    length = getattr(backbone, "max_sequence_length", None)
    rows = tuple(_row(site) for site in survey(model))
    return AttentionReport(
        title(model),
        rows,
        max_length=length if isinstance(length, int) else None,
        others=tuple(notes_of(model).shared_with),
        advice=tuple(_advice(rows) + [x for ask in ADVISERS for x in ask(model)]),
    )


def _advice(rows):
    """Returns sentences that say how to improve maps that data has not fitted yet."""
    if any(NOT_TRAINED in row.note for row in rows):
        return [
            "Some maps are not trained: call `keras_rfattn.uptrain(model, data, "
            "steps=...)`, or `keras_rfattn.load_maps` with maps for this checkpoint."
        ]
    if any(UNCALIBRATED in row.note for row in rows):
        return [
            "Some maps are uncalibrated: call `keras_rfattn.calibrate(model, data)`."
        ]
    return []


def _row(site):
    layer, name = site.layer, original_class(site.layer).__name__
    if not site.is_linear:
        note = "kept: "
        if is_pooling(site):
            note += "one query, for which softmax is already linear"
        else:
            note += local_note(site) or site.reason or "not selected"
        return Row(
            site.path, name, "softmax", None, site.causal, 0, None, note,
            window=site.window,
        )  # fmt: skip
    feature_map = layer.feature_map
    return Row(
        site.path,
        name,
        feature_maps.name_of(feature_map),
        None if feature_map.is_exact else feature_map.output_dim,
        site.causal,
        sum(math.prod(w.shape) for w in feature_map.weights),
        crossover(feature_map, layer),
        _note(site),
        told(layer.options, feature_map),
    )


def local_note(site):
    """Returns text on the sliding window of a softmax layer; empty if it is global."""
    if site.window is None:
        return ""
    return f"local already, linear in length (sliding window of {site.window} tokens)"


def crossover(feature_map, layer):
    """Computes the length above which linear attention takes fewer operations.

    Softmax attention over S keys takes `S (H + V)` multiply-adds per query, with head
    dim H and value size V; for V = H these are `4 S H` operations. Linear attention
    takes `2 H m` multiply-adds to project a query and a key on m random vectors, and
    `2 M V` for the sums of M features.

    Returns:
        Number of tokens S, or `None` for maps that compute their kernel exactly.
    """
    if feature_map.is_exact:
        return None
    _, head_dim = layer._kv_shape()
    value_dim = getattr(layer, "_value_dim", head_dim)
    # Heads that stay softmax save nothing at any length.
    share = 1 - len(layer.options.softmax_heads) / num_heads(layer)
    cost = multiplications(feature_map, head_dim, value_dim)
    return math.ceil(cost / (share * (head_dim + value_dim)))


def multiplications(feature_map, head_dim, value_dim):
    """Returns the multiplications `2 H m + 2 M V` of one linear head per token.

    Args:
        feature_map: `FeatureMap` with m random vectors and M features.
        head_dim: Size H of a query or key.
        value_dim: Size V of a value.
    """
    projected = feature_map.num_projections
    return 2 * (head_dim * projected + feature_map.output_dim * value_dim)


def _note(site):
    feature_map, options = site.layer.feature_map, site.layer.options
    notes = [_training(site.layer, feature_map.status(site.causal))]
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
        heads = ", ".join(map(str, options.softmax_heads))
        notes.append(f"softmax in heads {heads} of {num_heads(site.layer)}")
    dropped = sliding_window(site.layer), soft_cap(site.layer)
    names = "sliding window of {:g} tokens dropped", "soft cap of {:g} dropped"
    notes += [x.format(n) for x, n in zip(names, dropped, strict=True) if n is not None]
    rate = getattr(site.layer, "_dropout", 0) or getattr(site.layer, "dropout", 0)
    if isinstance(rate, (int, float)) and rate:
        notes.append(f"attention dropout {rate:g} inactive")
    return ", ".join(x for x in notes if x)


def _training(layer, status):
    """Returns text on how the map of a layer got its weights."""
    if not trained_weights(layer.feature_map):
        return status
    if layer.feature_map.was_trained:
        return f"trained ({layer.origin})" if layer.origin else "trained"
    return f"{status}, not trained" if status else NOT_TRAINED
