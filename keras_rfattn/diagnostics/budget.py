"""Where to spend width: the least error for a number of multiplications."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics.errors import estimate
from keras_rfattn.diagnostics.errors import head_errors
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.layers.recording import progress
from keras_rfattn.models import Plan
from keras_rfattn.models.report import multiplications


class Choice(NamedTuple):
    """One layer with one mechanism.

    Attributes:
        mechanism: Name of the map, `"softmax"` to keep the layer.
        num_features: Of the map, or `None`.
        multiplications: Per token, all heads.
        error: Relative error of outputs, mean over heads, on data not calibrated on.
    """

    mechanism: str
    num_features: int | None
    multiplications: float
    error: float


@dataclass(frozen=True)
class Allotment:
    """Widths by layer under a budget; prints as a table.

    `keras_rfattn.replace_attention(model, allotment)` carries it out.

    Attributes:
        layers: Dict from layer paths to their `Choice`.
        budget: Multiplications per token that were allowed, all layers together.
        one_width: The best `Choice` for all layers alike under the same budget, its
            multiplications and error those of all layers, or `None`.
        control: Error of uniform attention.
        seed: Of the random vectors.
    """

    layers: dict
    budget: float
    one_width: Choice | None
    control: float
    seed: int

    @property
    def multiplications(self):
        """Per token, all layers together."""
        return sum(choice.multiplications for choice in self.layers.values())

    @property
    def error(self):
        """Mean over layers."""
        return float(np.mean([choice.error for choice in self.layers.values()]))

    @property
    def plan(self):
        """A `keras_rfattn.models.Plan`."""
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
    """The `Allotment` of least error.

    Maps learn from the first half of each layer's sequences; errors are of the others.

    Args:
        found: List of `(path, layer, sequences)`.
        names: Maps to choose from.
        widths: Feature widths to choose from.
        budget: Multiplications per token, all layers together.
        length: Tokens that a softmax layer attends to, the data's mean if `None`.
        seed: Of the random vectors; layer i has `seed + i`.
        verbose: As in Keras.

    Raises:
        ValueError: If the budget does not pay for the cheapest choice everywhere.
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
    """A map's `Choice` for a layer, and the error of uniform attention there."""
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
    """One choice for each layer, by integer programming: least sum of errors."""
    from scipy.optimize import LinearConstraint
    from scipy.optimize import milp

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
    """The best single map and width for all layers within the budget, or `None`."""
    best = None
    for row in zip(*options, strict=True):
        cost = sum(choice.multiplications for choice in row)
        error = float(np.mean([choice.error for choice in row]))
        if cost <= budget and (best is None or error < best.error):
            best = Choice(row[0].mechanism, row[0].num_features, cost, error)
    return best


def adapted(name, width, seed, sequences):
    """A map of a given width, adapted to sequences of one layer.

    Args:
        name: Of the map.
        width: Feature width M.
        seed: Of its vectors.
        sequences: List of `Sequence`.
    """
    per_vector = feature_maps.get(name, num_features=1, seed=0).output_dim
    count = max(1, width // per_vector)
    feature_map = feature_maps.get(name, num_features=count, seed=seed)
    heads, _, dim = sequences[0].key.shape
    feature_map.build((None, None, heads, dim))
    if feature_map.is_adaptive:
        feature_map.adapt([(s.query, s.key) for s in sequences])
    return feature_map
