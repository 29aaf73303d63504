"""The approximation report, which compares every layer and head with softmax."""

from dataclasses import dataclass

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.errors import HeadErrors, head_errors
from keras_rfattn.layers import record
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import progress


@dataclass(frozen=True)
class HeadReport:
    """The approximation errors of one key/value head."""

    path: str  # of the layer
    head: int
    mechanism: str  # registered name of the feature map
    width: int  # number of features, M
    errors: HeadErrors


@dataclass(frozen=True)
class ApproximationReport:
    """The approximation errors of a model, which print as a table.

    Attributes:
        model: Class and name of the model.
        heads: Tuple of `HeadReport`, layer by layer.
    """

    model: str
    heads: tuple

    @property
    def mean(self):
        """The `HeadErrors` averaged over layers and heads."""
        return HeadErrors.mean([h.errors for h in self.heads])

    def layers(self):
        """Returns `(path, mechanism, width, HeadErrors)`, averaged over heads."""
        groups = {}
        for h in self.heads:
            groups.setdefault((h.path, h.mechanism, h.width), []).append(h.errors)
        return [(*key, HeadErrors.mean(errors)) for key, errors in groups.items()]

    def __str__(self):
        head = ("layer", "mechanism", "width", *HeadErrors._fields)
        head = tuple(x.replace("mean_of_values", "mean of V") for x in head)
        body = [
            (path, mechanism, str(width), *_cells(errors))
            for path, mechanism, width, errors in self.layers()
        ]
        body.append(("mean", "", "", *_cells(self.mean)))
        table = [head, *body]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        rows = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in table
        ]
        lines = [
            f"Approximation of softmax attention in {self.model}",
            *(row.rstrip() for row in rows),
            "Errors are relative, and 0 is exact. The controls are uniform attention "
            "(mean of V) and an output of zeros (1).",
        ]
        if np.isfinite(self.mean.covered):
            lines.append(
                "kernel: the median over all pairs. measured, predicted: the root mean "
                f"square over the {self.mean.covered:.1%} covered pairs, with "
                "‖x + y‖² <= log m. For other pairs, m = num_features is too small."
            )
        return "\n".join(lines)

    __repr__ = __str__


def approximation_report(model, data, max_tokens=512, verbose="auto"):
    """Measures how well linear attention approximates softmax, layer by layer.

    Every layer is measured on the activations of the softmax model, so that errors of
    earlier layers do not enter. The report measures the features alone, over all pairs
    of queries and keys. It ignores `softmax_heads`, and also `window`, within which
    attention is exact.

    Args:
        model: A model with linear attention.
        data: An iterable of batches; each batch is an input of `model(batch)`.
        max_tokens: Maximum number of queries and of keys used per sequence.
        verbose: 0, 1, 2 or `"auto"`, as in Keras.

    Returns:
        An `ApproximationReport`.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If the model has no linear attention, if it has polynomial
            attention, or if `data` has no real token.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> report = diagnostics.approximation_report(model, [x], verbose=0)
        >>> len(report.heads)
        2
    """
    check_model(model)
    recorded = record(model, data, True, max_tokens, verbose)
    if not recorded:
        raise ValueError(
            "`model` must have linear attention and `data` a batch with a real token. "
            f"Received: {title(model)}. Call `replace_attention` first."
        )
    heads = []
    for path, layer, sequences in progress(recorded, verbose):
        feature_map = layer.feature_map
        name, width = feature_maps.name_of(feature_map), feature_map.output_dim
        heads += [
            HeadReport(path, head, name, width, errors)
            for head, errors in enumerate(head_errors(feature_map, sequences))
        ]
    return ApproximationReport(title(model), tuple(heads))


def _cells(errors):
    """Returns the cells of a table row, with a reason where a number is missing."""
    missing = "num_features too small" if errors.covered == 0 else "unknown"
    return [missing if np.isnan(error) else f"{error:.3g}" for error in errors]
