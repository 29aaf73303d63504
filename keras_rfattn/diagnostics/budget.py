"""Allots feature widths to layers for the least error under a budget."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.errors import estimate, head_errors
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.layers.recording import progress
from keras_rfattn.models import Plan
from keras_rfattn.models.report import multiplications


class Choice(NamedTuple):
    """The cost and error of one mechanism in one layer.

    Attributes:
        mechanism: Name of the map, or `"softmax"` to keep softmax attention.
        num_features: The `num_features` of the map, or `None` for softmax.
        multiplications: Number of multiplications per token, for all heads.
        error: Relative error of outputs, averaged over heads, on sequences that were
            not used to calibrate (if there are at least two sequences).
    """

    mechanism: str
    num_features: int | None
    multiplications: float
    error: float


@dataclass(frozen=True)
class Allotment:
    """The map and width of each layer under a budget; prints as a table.

    `keras_rfattn.replace_attention(model, allotment)` applies it to a model.

    Attributes:
        layers: Dict from layer paths to their `Choice`.
        budget: Allowed multiplications per token, for all layers together.
        one_width: The best single `Choice` for all layers under the same budget, or
            `None` if there is none. Its multiplications are the sum over layers, and
            its error is the mean.
        control: Error of uniform attention, averaged over layers.
        seed: Seed of the random vectors.

    Examples:
        >>> from keras_rfattn import diagnostics
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> allotment = diagnostics.recommend(
        ...     model, [x], budget=1e6, candidates=["favor"], widths=[64], verbose=0)
        >>> isinstance(allotment, diagnostics.Allotment), len(allotment.layers)
        (True, 1)
    """

    layers: dict
    budget: float
    one_width: Choice | None
    control: float
    seed: int

    @property
    def multiplications(self):
        """Number of multiplications per token, for all layers together."""
        return sum(choice.multiplications for choice in self.layers.values())

    @property
    def error(self):
        """Relative error of outputs, averaged over layers."""
        return float(np.mean([choice.error for choice in self.layers.values()]))

    @property
    def plan(self):
        """The allotment as a `keras_rfattn.models.Plan`."""
        maps = {}
        for path, choice in self.layers.items():
            maps[path] = None
            if choice.num_features is not None:
                name, count = choice.mechanism, choice.num_features
                feature_map = feature_maps.get(name, num_features=count, seed=self.seed)
                maps[path] = feature_maps.serialize(feature_map)
        return Plan(maps)

    def __str__(self):
        width = max(len(path) for path in self.layers)
        names = "mechanism", "num_features", "multiplications", "error"
        lines = ["{:<{}}  {:<15}{:>13}{:>17}{:>8}".format("layer", width, *names)]
        rows = list(self.layers.items())
        rows.append(("all", Choice("", None, self.multiplications, self.error)))
        if self.one_width is not None:
            rows.append(("one width", self.one_width))
        lines += [
            f"{path:<{width}}  {name:<15}{count or '':>13}{cost:>17,.0f}{error:>8.3f}"
            for path, (name, count, cost, error) in rows
        ]
        lines.append(f"{'mean of V':<{width}}{'':<47}{self.control:>8.3f}")
        return "\n".join(lines)

    __repr__ = __str__


def allot(found, names, widths, budget, length, seed, verbose):
    """Finds the `Allotment` of least error.

    Maps learn from the first half of each layer's sequences, and errors are measured on
    the second half.

    Args:
        found: List of `(path, layer, sequences)`.
        names: Names of the maps to choose from.
        widths: Feature widths M to choose from.
        budget: Multiplications per token for all layers together.
        length: Number of tokens that a softmax layer attends to; the mean of the data
            if `None`.
        seed: Seed of the random vectors; layer i uses `seed + i`.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar, 2 for one line at the
            end, as in Keras.

    Returns:
        An `Allotment`.

    Raises:
        ValueError: If the budget is too small for the cheapest choice in every layer.
    """
    paths = [path for path, _, _ in found]
    options, controls = [[] for _ in found], []
    for width in progress(sorted(widths), verbose):
        for name in names:
            for i, (_, layer, sequences) in enumerate(found):
                half = max(1, len(sequences) // 2)
                known, held_out = sequences[:half], sequences[half:] or sequences
                choice, control = _tried(name, width, seed + i, layer, known, held_out)
                options[i].append(choice)
                controls.append(control)
    for choices, (_, layer, sequences) in zip(options, found, strict=True):
        tokens = length or np.mean([s.key.shape[1] for s in sequences])
        _, _, dim = sequences[0].key.shape
        heads, value_dim = num_heads(layer), sequences[0].value.shape[-1]
        cost = heads * tokens * (dim + value_dim)
        choices.append(Choice("softmax", None, cost, 0.0))
    taken = _cheapest_errors(options, budget)
    return Allotment(
        dict(zip(paths, taken, strict=True)), budget, _for_all(options, budget),
        float(np.mean(controls)), seed,
    )  # fmt: skip


def _tried(name, width, seed, layer, known, held_out):
    """Returns a map's `Choice` for a layer, and the error of uniform attention."""
    feature_map = adapted(name, width, seed, known)
    estimates = [estimate(feature_map, s) for s in held_out]
    errors = [
        head_errors(feature_map, held_out, head, estimates)
        for head in range(feature_map.num_heads)
    ]
    heads, value_dim = num_heads(layer), held_out[0].value.shape[-1]
    cost = heads * multiplications(feature_map, feature_map.head_dim, value_dim)
    error = float(np.mean([e.output for e in errors]))
    control = float(np.mean([e.mean_of_values for e in errors]))
    return Choice(name, feature_map.num_features, cost, error), control


def _cheapest_errors(options, budget):
    """Picks one choice per layer by integer programming, for the least total error."""
    from scipy.optimize import LinearConstraint, milp

    flat = [(i, choice) for i, row in enumerate(options) for choice in row]
    costs = np.array([choice.multiplications for _, choice in flat])
    least = sum(min(c.multiplications for c in row) for row in options)
    if least > budget:
        raise ValueError(
            "`budget` does not pay for the narrowest choice in every layer, "
            f"{least:,.0f} multiplications per token. Received: budget={budget!r}. "
            "Raise it, or try smaller `widths`."
        )
    layer_of = np.array([i for i, _ in flat])
    one_each = np.arange(len(options))[:, None] == layer_of
    result = milp(
        [choice.error for _, choice in flat],
        integrality=np.ones(len(flat)),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one_each.astype(float), 1, 1),
            LinearConstraint(costs[None] / budget, 0, 1),
        ],
    )
    return [choice for x, (_, choice) in zip(result.x, flat, strict=True) if x > 0.5]


def _for_all(options, budget):
    """Returns the best single choice for all layers within the budget, or `None`."""
    best = None
    for row in zip(*options, strict=True):
        cost = sum(choice.multiplications for choice in row)
        error = float(np.mean([choice.error for choice in row]))
        if cost <= budget and (best is None or error < best.error):
            best = Choice(row[0].mechanism, row[0].num_features, cost, error)
    return best


def adapted(name, width, seed, sequences):
    """Builds a map of a given width, and adapts it to sequences of one layer.

    Args:
        name: Registered name of the map.
        width: Feature width M.
        seed: Seed of its random vectors.
        sequences: List of `keras_rfattn.layers.recording.Sequence`.

    Returns:
        A built `FeatureMap`.
    """
    per_vector = feature_maps.get(name, num_features=1, seed=0).output_dim
    count = max(1, width // per_vector)
    feature_map = feature_maps.get(name, num_features=count, seed=seed)
    heads, _, dim = sequences[0].key.shape
    feature_map.build((None, None, heads, dim))
    if feature_map.is_adaptive:
        feature_map.adapt([(s.query, s.key) for s in sequences])
    return feature_map
