"""Recommends feature maps and their widths for a wanted error or a budget."""

from dataclasses import dataclass

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.budget import Allotment, Choice, best_for_all, least_error
from keras_rfattn.diagnostics.errors import HeadErrors, head_errors
from keras_rfattn.feature_maps.arguments import check_seed, is_integer, is_number
from keras_rfattn.layers import LinearAttention, record
from keras_rfattn.layers.checks import check_model, num_heads, title
from keras_rfattn.layers.recording import progress
from keras_rfattn.models import replace_attention, restore_attention
from keras_rfattn.models.report import multiplications
from keras_rfattn.models.survey import survey

CANDIDATES = ("favor", "favorplus", "favorpp", "favorpp_dense")
WIDTHS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Recommendation:
    """The narrowest map that reaches a wanted error; prints as a table with a verdict.

    Attributes:
        mechanism: Name of the map. `None` if no map reaches the error, or if uniform
            attention reaches it too.
        num_features: The `num_features` of the map, or `None`.
        wanted: The wanted relative error.
        control: The error of uniform attention.
        tried: Tuple of `(mechanism, num_features, width, error)`, everything that was
            measured.
    """

    mechanism: str | None
    num_features: int | None
    wanted: float
    control: float
    tried: tuple

    def __str__(self):
        lines = [
            f"{'mechanism':<15}{'num_features':>13}{'width':>7}{'output error':>14}"
        ]
        lines += [
            f"{name:<15}{count:>13}{width:>7}{error:>14.3f}"
            for name, count, width, error in self.tried
        ]
        lines.append(f"{'mean of V':<35}{self.control:>14.3f}")
        if self.control <= self.wanted:
            lines.append(
                f"The mean of V reaches {self.wanted}, so that this error shows "
                f"nothing about attention. Use an `error` below {self.control:.3g}."
            )
        elif self.mechanism is None:
            lines.append(
                f"No candidate reaches {self.wanted} without training. Uptrain the "
                "model, or keep layers with large errors softmax (`exclude=`)."
            )
        else:
            lines.append(
                f"{self.mechanism!r} with num_features={self.num_features} reaches "
                f"{self.wanted} without training."
            )
        return "\n".join(lines)

    __repr__ = __str__


def recommend(
    model,
    data,
    error=None,
    candidates=CANDIDATES,
    widths=WIDTHS,
    max_tokens=512,
    seed=0,
    verbose="auto",
    *,
    budget=None,
    length=None,
):
    """Recommends a map and width for a wanted error or a budget, without training.

    It measures the relative error of attention outputs on the activations of the
    softmax model, averaged over layers and heads. Maps that learn from data learn from
    the same activations. Under a budget they learn from the first half of the sequences
    only, and errors are measured on the other half; pass at least two sequences.

    Args:
        model: A model with softmax or linear attention. It is unchanged afterwards.
        data: An iterable of batches; each batch is an input of `model(batch)`.
        error: The wanted relative error, between 0 and 1. The answer is one map and
            width for all layers.
        candidates: Names of maps that estimate the softmax kernel.
        widths: Feature widths M to try; they are tried in increasing order.
        max_tokens: Maximum number of queries and of keys used per sequence.
        seed: Non-negative integer, the seed of the random vectors.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar, 2 for one line at the
            end, as in Keras.
        budget: Number of multiplications per token for all attention layers together,
            given instead of `error`. A head costs `2 H m + 2 M V` (head size H, m
            random vectors, M features, value size V), or `T (H + V)` if it stays
            softmax. The answer is a map and width, or softmax, for each layer, chosen
            for the least error.
        length: Number of tokens T that softmax layers attend to, for their cost. The
            default is the mean of the data.

    Returns:
        A `Recommendation`. For a budget, an `Allotment`, which `replace_attention`
        takes as `feature_map`.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If not exactly one of `error` and `budget` is given, `error` is not
            between 0 and 1, `budget` is too small or not positive, the model has no
            attention, a candidate does not estimate softmax, `widths` are not positive
            integers, `length` is not positive, or `seed` is not a non-negative integer.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> result = diagnostics.recommend(
        ...     model, [x], error=0.5, candidates=["favorplus"], widths=[64], verbose=0)
        >>> [(name, width) for name, _, width, _ in result.tried]
        [('favorplus', 64)]
    """
    check_model(model)
    names, widths = _checked(error, budget, candidates, widths, length, seed)
    if data is None:
        raise ValueError("`data` must be an iterable of batches. Received: data=None.")
    recorded = _recorded(model, data, max_tokens, verbose)
    if budget is None:
        return _narrowest(recorded, names, widths, error, seed, verbose)
    return _allotted(recorded, names, widths, budget, length, seed, verbose)


def _checked(error, budget, candidates, widths, length, seed):
    """Returns names and widths as lists, or raises `ValueError` for bad arguments."""
    if (error is None) == (budget is None):
        raise ValueError(
            "`error` must be a number between 0 and 1, or `budget` a number of "
            f"multiplications, and not both. Received: error={error!r}, "
            f"budget={budget!r}."
        )
    if budget is not None and not (is_number(budget) and budget > 0):
        raise ValueError(
            f"`budget` must be a positive number. Received: budget={budget!r}."
        )
    if error is not None and not (is_number(error) and 0 < error < 1):
        raise ValueError(f"`error` must be between 0 and 1. Received: error={error!r}.")
    is_listed = isinstance(widths, (list, tuple, range, np.ndarray))
    widths = list(widths) if is_listed else [widths]
    if not widths or not all(is_integer(width) and width > 0 for width in widths):
        raise ValueError(
            "`widths` must be a non-empty list of positive integers. "
            f"Received: widths={widths!r}."
        )
    is_listed = isinstance(candidates, (list, tuple))
    names = list(candidates) if is_listed else [candidates]
    known = feature_maps.list()
    kernels = [feature_maps.get(x, seed=0).kernel for x in names if x in known]
    if not names or kernels != ["softmax"] * len(names):
        raise ValueError(
            "`candidates` must be one or more names of maps that estimate softmax. "
            f"Received: candidates={candidates!r}."
        )
    if length is not None and not (is_number(length) and 0 < length < np.inf):
        raise ValueError(
            "`length` must be a positive number of tokens, or `None` for the mean "
            f"length of the data. Received: length={length!r}."
        )
    check_seed(seed)
    if seed is None:
        raise ValueError("`seed` must be an integer. Received: seed=None.")
    return names, widths


def _recorded(model, data, max_tokens, verbose):
    """Records the softmax model's attention; paths are those of `replace_attention`."""
    layers = model._flatten_layers()
    is_softmax = not any(isinstance(layer, LinearAttention) for layer in layers)
    if is_softmax:
        replace_attention(
            model, "favorplus", num_features=1, seed=0, drop_soft_cap=True
        )
    try:
        recorded = record(model, data, True, max_tokens, verbose)
        paths = {id(site.layer): site.path for site in survey(model)}
    finally:
        if is_softmax:
            restore_attention(model)
    if not recorded:
        raise ValueError(f"`data` must hold a real token. Received: {title(model)}.")
    return [(paths[id(layer)], layer, sequences) for _, layer, sequences in recorded]


def _narrowest(recorded, names, widths, error, seed, verbose):
    """Returns the `Recommendation` of one map and width for all layers."""
    tried = []
    for width in progress(sorted(widths), verbose):
        reaching = []
        for name in names:
            errors = []
            for i, (_, _, sequences) in enumerate(recorded):
                feature_map = _adapted(name, width, seed + i, sequences)
                errors += head_errors(feature_map, sequences)
            mean = HeadErrors.mean(errors)
            # The map of any layer has these.
            count, width_of_map = feature_map.num_features, feature_map.output_dim
            tried.append((name, count, width_of_map, mean.output))
            control = mean.mean_of_values
            if mean.output <= error:
                reaching.append((mean.output, name, count))
        if control <= error:
            # Uniform attention reaches the error too, so no map is needed.
            reaching = []
        if control <= error or reaching:
            break
    _, name, count = min(reaching, default=(None, None, None), key=lambda x: x[0])
    return Recommendation(name, count, error, control, tuple(tried))


def _allotted(recorded, names, widths, budget, length, seed, verbose):
    """Returns the `Allotment` of least error.

    Maps learn from the first half of each layer's sequences, and errors are measured on
    the second half. A single sequence serves both purposes.
    """
    options, controls = [[] for _ in recorded], []
    for width in progress(sorted(widths), verbose):
        for name in names:
            for i, (_, layer, sequences) in enumerate(recorded):
                half = max(1, len(sequences) // 2)
                held_out = sequences[half:] or sequences
                feature_map = _adapted(name, width, seed + i, sequences[:half])
                mean = HeadErrors.mean(head_errors(feature_map, held_out))
                value_dim = sequences[0].value.shape[-1]
                by_head = multiplications(feature_map, feature_map.head_dim, value_dim)
                cost = num_heads(layer) * by_head
                count = feature_map.num_features
                options[i].append(Choice(name, count, cost, mean.output))
                controls.append(mean.mean_of_values)
    for choices, (_, layer, sequences) in zip(options, recorded, strict=True):
        tokens = length or np.mean([sequence.key.shape[1] for sequence in sequences])
        dims = sequences[0].key.shape[-1] + sequences[0].value.shape[-1]
        cost = num_heads(layer) * tokens * dims
        choices.append(Choice("softmax", None, cost, 0.0))
    paths = [path for path, _, _ in recorded]
    return Allotment(
        layers=dict(zip(paths, least_error(options, budget), strict=True)),
        budget=budget,
        one_width=best_for_all(options, budget),
        control=float(np.mean(controls)),
        seed=seed,
    )


def _adapted(name, width, seed, sequences):
    """Builds a map of a given width, and adapts it to the `Sequence`s of one layer."""
    per_vector = feature_maps.get(name, num_features=1, seed=0).output_dim
    count = max(1, width // per_vector)
    feature_map = feature_maps.get(name, num_features=count, seed=seed)
    heads, _, dim = sequences[0].key.shape
    feature_map.build((None, None, heads, dim))
    if feature_map.is_adaptive:
        feature_map.adapt([(s.query, s.key) for s in sequences])
    return feature_map
