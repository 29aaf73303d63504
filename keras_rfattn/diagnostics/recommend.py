"""Recommends a feature map and its width for a wanted error or a budget."""

from dataclasses import dataclass

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.budget import adapted, allot
from keras_rfattn.diagnostics.errors import estimate, head_errors
from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.layers import LinearAttention, record
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import progress
from keras_rfattn.models import replace_attention, restore_attention
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
        lines.append(f"{'no attention':<35}{self.control:>14.3f}")
        if self.control <= self.wanted:
            lines.append(
                f"The mean of V reaches {self.wanted}: the model needs no attention at "
                f"this error. Ask for less than {self.control:.3g}."
            )
        elif self.mechanism is None:
            lines.append(
                f"None reaches {self.wanted} without training. Uptrain the model, or "
                "keep its hardest layers softmax (`exclude=`)."
            )
        else:
            lines.append(
                f"{self.mechanism!r} with num_features={self.num_features} reaches "
                f"{self.wanted} without training."
            )
        return "\n".join(lines)

    __repr__ = __str__


def recommend(
    model, data, error=None, candidates=CANDIDATES, widths=WIDTHS, max_tokens=512,
    seed=0, verbose="auto", *, budget=None, length=None,
):  # fmt: skip
    """Recommends a map and width for a wanted error or a budget, without training.

    It measures the relative error of attention outputs on the activations of the
    softmax model, averaged over layers and heads. Maps that learn from data learn from
    the same activations, or, under a budget, from the first half of the sequences only.

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
    candidates, widths = _check_arguments(error, budget, candidates, widths)
    if length is not None and not (_is_number(length) and 0 < length < np.inf):
        raise ValueError(
            "`length` must be a positive number of tokens, or `None` for the data's "
            f"mean. Received: length={length!r}."
        )
    check_seed(seed)
    if seed is None:
        raise ValueError("`seed` must be an integer. Received: seed=None.")
    if data is None:
        raise ValueError("`data` must be an iterable of batches. Received: data=None.")
    is_softmax = not any(
        isinstance(layer, LinearAttention) for layer in model._flatten_layers()
    )
    if is_softmax:
        replace_attention(model, "favorplus", num_features=1, seed=0)
    try:
        found = record(model, data, True, max_tokens, verbose)
        paths = {id(site.layer): site.path for site in survey(model).sites}
    finally:
        if is_softmax:
            restore_attention(model)
    if not found:
        raise ValueError(f"`data` must hold a real token. Received: {title(model)}.")
    if budget is not None:
        found = [(paths[id(layer)], layer, x) for _, layer, x in found]
        return allot(found, candidates, widths, budget, length, seed, verbose)
    tried, best, control = [], None, np.nan
    for width in progress(sorted(widths), verbose):
        for name in candidates:
            maps = [
                adapted(name, width, seed + i, x) for i, (*_, x) in enumerate(found)
            ]
            errors = [
                head_errors(feature_map, sequences, head, estimates)
                for feature_map, (_, _, sequences) in zip(maps, found, strict=True)
                for estimates in [[estimate(feature_map, s) for s in sequences]]
                for head in range(feature_map.num_heads)
            ]
            measured = float(np.mean([e.output for e in errors]))
            control = float(np.mean([e.mean_of_values for e in errors]))
            count = maps[0].num_features
            tried.append((name, count, maps[0].output_dim, measured))
            # A map must also be better than uniform attention and than zero output.
            is_good = measured <= error and measured < min(control, 1)
            if is_good and (best is None or measured < best[2]):
                best = (name, count, measured)
        if control <= error:
            best = None
            break
        if best is not None:
            break
    name, count, _ = best or (None, None, None)
    return Recommendation(name, count, error, control, tuple(tried))


def _check_arguments(error, budget, candidates, widths):
    """Returns names and widths as lists, or raises `ValueError` for bad arguments."""
    if (error is None) == (budget is None):
        raise ValueError(
            "`error` must be a number between 0 and 1, or `budget` a number of "
            f"multiplications, and not both. Received: error={error!r}, "
            f"budget={budget!r}."
        )
    if budget is not None and (not _is_number(budget) or not budget > 0):
        raise ValueError(
            f"`budget` must be a positive number. Received: budget={budget!r}."
        )
    if error is not None and (not _is_number(error) or not 0 < error < 1):
        raise ValueError(f"`error` must be between 0 and 1. Received: error={error!r}.")
    is_listed = isinstance(widths, (list, tuple, range, np.ndarray))
    widths = list(widths) if is_listed else [widths]
    integers = [
        x for x in widths
        if isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x > 0
    ]  # fmt: skip
    if not widths or len(integers) < len(widths):
        raise ValueError(
            "`widths` must be a list of positive integers, at least one. "
            f"Received: widths={widths!r}."
        )
    is_list = isinstance(candidates, (list, tuple))
    names = list(candidates) if is_list else [candidates]
    known = feature_maps.list()
    kernels = [feature_maps.get(x, seed=0).kernel for x in names if x in known]
    if not names or kernels != ["softmax"] * len(names):
        raise ValueError(
            "`candidates` must be names of maps that estimate softmax, at least one. "
            f"Received: candidates={candidates!r}."
        )
    return names, widths


def _is_number(x):
    return isinstance(x, (int, float, np.number)) and not isinstance(x, bool)
