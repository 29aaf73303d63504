"""Measures where softmax attention puts its weight: first tokens, window, rest."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_rfattn.diagnostics.errors import visibility
from keras_rfattn.layers import record
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import progress
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.rows import nearby

# No sequence is longer, so that all of its tokens are kept.
ALL_TOKENS = 2**31 - 1


class LayerShares(NamedTuple):
    """Shares of the softmax weight of one layer, which add up to 1.

    Attributes:
        path: Path of the layer.
        sinks: Share of the first tokens.
        window: Share of the keys in the window that are not among the first tokens.
        rest: Share of all other keys, which features estimate.
        largest_rest: The share `rest` of the head where it is largest.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> diagnostics.LayerShares("layer", 0.5, 0.3, 0.2, 0.4).rest
        0.2
    """

    path: str
    sinks: float
    window: float
    rest: float
    largest_rest: float


@dataclass(frozen=True)
class WeightShares:
    """Shares of softmax attention by part of the context; prints as a table.

    Attributes:
        options: The `ops.Options` with the window and the sinks.
        layers: Tuple of `LayerShares`.

    Examples:
        >>> from keras_rfattn import diagnostics, ops
        >>> row = diagnostics.LayerShares("layer", 0.5, 0.3, 0.2, 0.4)
        >>> shares = diagnostics.WeightShares(ops.Options(window=64, sinks=4), (row,))
        >>> print(shares)
        layer  first 4  window  rest  rest, largest head
        layer     0.50    0.30  0.20                0.40
    """

    options: Options
    layers: tuple

    def __str__(self):
        head = ("layer", f"first {self.options.sinks}", "window", "rest",
                "rest, largest head")  # fmt: skip
        table = [head] + [
            (path, *(f"{x:.2f}" for x in shares)) for path, *shares in self.layers
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0])]
                      + [x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)])
            for row in table
        )  # fmt: skip

    __repr__ = __str__


def weight_shares(model, data, window=64, sinks=4, sliding=False, verbose="auto"):
    """Measures the share of softmax weight by part of the context, layer by layer.

    It shows what a window and sinks leave to the features: where the rest is small, a
    linear layer owes its quality to the window; where it is large, the features carry
    it. Every layer is measured on the activations of the softmax model. The mean is
    over all queries that see a key outside the window and the sinks.

    Args:
        model: A model with linear attention.
        data: An iterable of batches; each batch is an input of `model(batch)`.
        window: Number of tokens in a window, as in `replace_attention`.
        sinks: Number of first tokens, as in `replace_attention`.
        sliding: Whether the windows next to a query's own count too.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar, 2 for one line at the
            end, as in Keras.

    Returns:
        A `WeightShares`.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an option is invalid, if the model has no linear attention, or if
            no sequence of `data` is longer than the window.

    Reference:
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024).

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> shares = diagnostics.weight_shares(model, [x], 2, sinks=1, verbose=0)
        >>> bool(abs(sum(shares.layers[0][1:4]) - 1) < 1e-6)
        True
    """
    check_model(model)
    options = Options(window=window, sinks=sinks, sliding=sliding)
    recorded = record(model, data, True, ALL_TOKENS, verbose)
    rows = []
    for path, _, sequences in progress(recorded, verbose):
        found = [x for x in (_shares(s, options) for s in sequences) if x is not None]
        if found:
            by_head = np.concatenate(found, axis=1).mean(axis=1)
            mean = by_head.mean(axis=0)
            rows.append(LayerShares(path, *mean.tolist(), float(by_head[:, 2].max())))
    if not rows:
        raise ValueError(
            "`model` must have linear attention, and `data` a sequence that is longer "
            f"than the window and the sinks. Received: {title(model)}, window={window} "
            f"and sinks={sinks}. Use longer sequences, or a smaller window."
        )
    return WeightShares(options, tuple(rows))


def _shares(sequence, options):
    """Returns shares `(K, queries, 3)`, or `None` if no query sees another key."""
    query, key = (sequence.query, sequence.key)
    scale = sequence.logit_scale
    if sequence.softmax is not None:
        (query, key), scale = sequence.softmax, 1.0
    visible, length = visibility(sequence), key.shape[1]
    if query.shape[1] % length:  # cross-attention has no window
        return None
    groups = query.shape[1] // length
    rows = np.arange(length).repeat(groups)
    near = nearby(
        None, rows, length, options.window, options.sliding, sequence.causal
    )  # fmt: skip
    near = ops.convert_to_numpy(near)[0]
    first = np.broadcast_to(np.arange(length) < options.sinks, near.shape)
    parts = np.stack([first, near & ~first, ~near & ~first], axis=-1)
    counted = (parts[..., 2] & visible).any(axis=1)
    if not counted.any():
        return None
    logits = scale * query[:, counted] @ key.swapaxes(-1, -2)
    if sequence.soft_cap is not None:
        logits = sequence.soft_cap * np.tanh(logits / sequence.soft_cap)
    logits = np.where(visible[counted], logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kts,tsp->ktp", weights, parts[counted].astype("float64"))
