"""Plans the stages of uptraining: their order and how steps are divided."""

from typing import NamedTuple


class Planned(NamedTuple):
    """A stage to run.

    Attributes:
        name: Name of the stage.
        steps: Number of steps.
        layer: Index of the layer that learns if `order="bottom_up"`, else `None`.
    """

    name: str
    steps: int
    layer: int | None = None


def planned(settings, layers, trains):
    """Iterates over the `Planned` stages of `uptrain` for the given settings.

    Args:
        settings: Dict of arguments of `uptrain`.
        layers: The linear attention layers.
        trains: Function that takes a layer and returns whether any weight of it trains.
    """
    stages, total = settings["stages"], settings["steps"]
    training = [x for x in stages if x != "calibrate"]
    shares = _shared(total, len(training))
    for name in stages:
        if name == "calibrate":
            if any(x.feature_map.is_adaptive for x in layers):
                yield Planned(name, 0)
        elif name == "attention" and settings["order"] == "bottom_up":
            places = [i for i, layer in enumerate(layers) if trains(layer)]
            parts = _shared(next(shares), len(places))
            for i, steps in zip(places, parts, strict=True):
                yield Planned(name, steps, i)
        else:
            yield Planned(name, next(shares))


def planned_rounds(rounds, settings, layers, trains):
    """Returns the list of `Planned` stages of a run that may have been extended.

    Args:
        rounds: List with the steps of the first call, then those of each extension.
        settings: Dict of arguments of `uptrain`; its `steps` are ignored.
        layers: The linear attention layers.
        trains: Function that takes a layer and returns whether any weight of it trains.
    """
    plan = []
    for i, steps in enumerate(rounds):
        # Later rounds do not calibrate, because the first one has trained the maps.
        stages = [x for x in settings["stages"] if i == 0 or x != "calibrate"]
        own = {**settings, "stages": stages, "steps": steps}
        plan += planned(own, layers, trains)
    return plan


def _shared(total, parts):
    """Iterates over `parts` integers, as equal as possible, that sum to `total`."""
    for i in range(parts):
        yield total // parts + (i < total % parts)
