"""The stages of an uptraining, in order, and how steps are shared out among them."""

from typing import NamedTuple


class Planned(NamedTuple):
    """A stage that is to be run: its steps, and which layer if bottom up."""

    name: str
    steps: int
    layer: int | None = None


def planned(settings, layers, trains):
    """Iterates over `Planned` stages of `uptrain` with some settings.

    Args:
        settings: Arguments of `uptrain`.
        layers: The linear layers.
        trains: Function of a layer: whether anything of it trains.
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
    """The list of `Planned` stages of a run that was extended.

    Args:
        rounds: Steps of the first call, and what each extension added.
        settings: Arguments of `uptrain`, whose `steps` are not asked.
        layers: The linear layers.
        trains: Function of a layer: whether anything of it trains.
    """
    plan = []
    for i, steps in enumerate(rounds):
        # Later rounds do not calibrate again, as the first one has trained the maps.
        stages = [x for x in settings["stages"] if i == 0 or x != "calibrate"]
        own = {**settings, "stages": stages, "steps": steps}
        plan += planned(own, layers, trains)
    return plan


def _shared(total, parts):
    """Iterates over whole numbers that add up to `total`, as equal as can be."""
    for i in range(parts):
        yield total // parts + (i < total % parts)
