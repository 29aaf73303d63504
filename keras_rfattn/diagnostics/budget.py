"""Allots a budget of multiplications to the attention layers of a model."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.models import Plan


class Choice(NamedTuple):
    """The cost and error of one mechanism in one layer.

    Attributes:
        mechanism: Name of the map, or `"softmax"` to keep softmax attention.
        num_features: The `num_features` of the map, or `None` for softmax.
        multiplications: Number of multiplications per token, for all heads.
        error: Relative error of outputs, averaged over heads. It is measured on
            sequences that the map did not learn from. If the data has only one
            sequence, the map learns from it too, and the error is too low for maps
            that learn.
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


def least_error(options, budget):
    """Picks one choice per layer by integer programming, for the least total error.

    Args:
        options: List with one list of `Choice` for each layer.
        budget: Allowed multiplications per token, for all layers together.

    Returns:
        List with one `Choice` for each layer.

    Raises:
        ValueError: If the budget is too small for the cheapest choice in every layer.
    """
    from scipy.optimize import LinearConstraint, milp

    flat = [(i, choice) for i, row in enumerate(options) for choice in row]
    costs = np.array([choice.multiplications for _, choice in flat])
    least = sum(min(c.multiplications for c in row) for row in options)
    if least > budget:
        raise ValueError(
            "`budget` must allow the narrowest choice in every layer, which takes "
            f"{least:,.0f} multiplications per token. Received: budget={budget!r}. "
            "Use a larger `budget` or smaller `widths`."
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


def best_for_all(options, budget):
    """Returns the best single choice for all layers within the budget, or `None`.

    The arguments are those of `least_error`. The lists of all layers hold the same
    mechanisms in the same order.
    """
    found = []
    for row in zip(*options, strict=True):
        cost = sum(choice.multiplications for choice in row)
        error = float(np.mean([choice.error for choice in row]))
        if cost <= budget:
            found.append(Choice(row[0].mechanism, row[0].num_features, cost, error))
    return min(found, key=lambda choice: choice.error, default=None)
