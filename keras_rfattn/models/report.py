"""What attention a model has: the report that `describe_attention` returns."""

import math
from dataclasses import dataclass
from dataclasses import field

import keras_rfattn.models.survey as s
from keras_rfattn import feature_maps
from keras_rfattn.layers.checks import check_model
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.implementation import told
from keras_rfattn.models.swap import original_class


@dataclass(frozen=True)
class Row:
    """One attention layer.

    Attributes:
        path: Names of the layers from the model to this one.
        original_class: Name of the softmax class.
        mechanism: Registered name of the feature map, or "softmax".
        width: Feature width M, `None` for softmax.
        causal: True, False, or `None` where each call decides.
        parameters_added: Number of weights the mechanism owns.
        crossover: Length in tokens at which linear attention takes fewer
            operations than softmax, `None` for softmax.
        note: Why it was kept, or what to know about it.
        implementation: Which program computes it and why, `None` for softmax.
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


@dataclass(frozen=True)
class AttentionReport:
    """Every attention layer of a model; prints as a table."""

    model: str
    rows: tuple
    max_length: int | None = None
    others: tuple = field(default=())

    @property
    def replaced(self):
        """Rows with linear attention."""
        return tuple(row for row in self.rows if row.mechanism != "softmax")

    @property
    def kept(self):
        """Rows with softmax attention."""
        return tuple(row for row in self.rows if row.mechanism == "softmax")

    @property
    def parameters_added(self):
        """Weights that all mechanisms own together."""
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
        lines = [
            f"{replaced} of {total} layers linear, "
            f"{self.parameters_added:,} parameters added"
        ]
        crossovers = [x.crossover for x in self.replaced if x.crossover is not None]
        if crossovers:
            crossover = max(crossovers)
            text = f"fewer operations than softmax above {crossover} tokens"
            if self.max_length is not None and self.max_length <= crossover:
                text += (
                    f", and the model takes {self.max_length} (see `extend_positions`)"
                )
            lines.append(text)
        programs = dict.fromkeys(x.implementation for x in self.replaced)
        lines += [f"computed by {x}" for x in programs]
        lines += [f"also changed, as it shares layers: {x}" for x in self.others]
        return lines

    __repr__ = __str__


def describe_attention(model):
    """Reports the attention of a model: original, replaced or reloaded.

    Args:
        model: A Keras model or layer.

    Returns:
        An `AttentionReport`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If it is not built.
    """
    check_model(model)
    rows = tuple(_row(site) for site in s.survey(model).sites)
    return AttentionReport(
        title(model),
        rows,
        max_length=_max_length(model),
        others=tuple(getattr(model, "_rfattn_shared_with", ())),
    )


def _max_length(model):
    backbone = getattr(model, "backbone", None) or model
    length = getattr(backbone, "max_sequence_length", None)
    return length if isinstance(length, int) else None


def line(site):
    """One attention layer in a line, for error messages."""
    text = f"{site.path} ({original_class(site.layer).__name__})"
    return f"{text}: {site.reason}" if site.reason else text


def _row(site):
    layer, name = site.layer, original_class(site.layer).__name__
    if not site.is_linear:
        note = "kept: "
        if s.is_pooling(site):
            note += "one query, softmax is linear already"
        else:
            note += site.reason or "not selected"
        return Row(site.path, name, "softmax", None, site.causal, 0, None, note)
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


def crossover(feature_map, layer):
    """Tokens S at which `4 S H` operations per token exceed linear attention's.

    Softmax multiplies and adds `S (H + V)` times per query; linear attention
    `2 H m` for the projections of a query and a key, and `2 M V` for their sums.
    """
    if feature_map.is_exact:
        return None
    _, head_dim = layer._kv_shape()
    value_dim = getattr(layer, "_value_dim", head_dim)
    # What softmax heads take is theirs at any length.
    share = 1 - len(layer.options.softmax_heads) / num_heads(layer)
    cost = multiplications(feature_map, head_dim, value_dim)
    return math.ceil(cost / (share * (head_dim + value_dim)))


def multiplications(feature_map, head_dim, value_dim):
    """Of a query and its key in one head, by linear attention: `2 H m + 2 M V`."""
    projected = feature_map.num_projections
    return 2 * (head_dim * projected + feature_map.output_dim * value_dim)


def _note(site):
    feature_map, options = site.layer.feature_map, site.layer.options
    notes = [x for x in [feature_map.status(site.causal)] if x]
    if feature_map.is_exact:
        notes.append("quadratic in length")
    elif options.window is not None:
        text = f"exact within {options.window} tokens"
        beside = "window before" if site.causal else "windows beside"
        notes.append(text + f" and the {beside}" * options.sliding)
    if options.temperature is not None:
        notes.append(f"normalized, temperature {options.temperature:g}")
    if options.softmax_heads:
        heads = ", ".join(map(str, options.softmax_heads))
        notes.append(f"softmax in heads {heads} of {num_heads(site.layer)}")
    rate = getattr(site.layer, "_dropout", 0) or getattr(site.layer, "dropout", 0)
    if isinstance(rate, (int, float)) and rate:
        notes.append(f"attention dropout {rate:g} inactive")
    return ", ".join(notes)
