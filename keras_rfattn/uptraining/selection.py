"""What trains."""

import contextlib

from keras_rfattn.layers.checks import projection
from keras_rfattn.layers.checks import title

TRAINABLE = ("maps", "query_key", "lora", "all")
# Stages that train, in their order.
STAGES = ("attention", "features")


def by_stage(trainable):
    """What trains in each stage: one of `TRAINABLE` for all, or a dict by stage.

    Raises:
        ValueError: If it is neither.
    """
    given = (
        trainable if isinstance(trainable, dict) else dict.fromkeys(STAGES, trainable)
    )
    for stage, what in given.items():
        if stage not in STAGES or what not in TRAINABLE:
            raise ValueError(
                f"`trainable` must be one of {TRAINABLE}, or a dict of such by name of "
                f"a stage that trains, {STAGES}. Received: trainable={trainable!r}."
            )
    return {stage: given.get(stage, TRAINABLE[0]) for stage in STAGES}


def chosen(model, layers, trainable, lora_rank, stages):
    """The variables that stages train, by name of the stage.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trainable: One of `TRAINABLE` by name of the stage.
        lora_rank: Rank of the adapters that `"lora"` adds where there are none.
        stages: Names of those that train.

    Raises:
        ValueError: If nothing is left to train in a stage.
    """
    maps = [v for layer in layers for v in layer.feature_map.variables if v.trainable]
    found = {}
    for stage in stages:
        own = _own(model, layers, trainable[stage], stage, lora_rank)
        found[stage] = once([*maps, *own])
    empty = [name for name in stages if not found[name]]
    if empty:
        mechanisms = sorted({type(x.feature_map).__name__ for x in layers})
        asked = trainable[empty[0]]
        frozen = "" if asked == "maps" else ", and its own weights are frozen"
        raise ValueError(
            f"Nothing would train in {empty}: {title(model)} has "
            f"{', '.join(mechanisms)}, without trainable weights{frozen}. Received: "
            f"trainable={asked!r}. Use a learned map such as 'hedgehog', or "
            "trainable='query_key' with queries and keys whose `trainable` is True."
        )
    return found


def _own(model, layers, trainable, stage, lora_rank):
    """What trains in a stage besides maps; in `"attention"` queries and keys alone."""
    if trainable == "maps":
        return []
    if trainable == "all" and stage == "features":
        return [v for v in model.variables if v.trainable]
    sides = once(projection(x, side) for x in layers for side in ("query", "key"))
    if trainable != "lora":
        return [v for x in sides for v in x.variables if v.trainable]
    ends = [projection(x, side) for x in layers for side in ("value", "output")]
    everything = once([*sides, *ends])
    for dense in everything:
        if not getattr(dense, "lora_enabled", False):
            dense.enable_lora(lora_rank)
    taken = everything if stage == "features" else sides
    return [v for x in taken for v in (x.lora_kernel_a, x.lora_kernel_b)]


@contextlib.contextmanager
def only_training(model, variables):
    """Of a model's variables these alone are trainable meanwhile."""
    wanted = {id(v) for v in variables}
    before = [(v, v.trainable) for v in model.variables]
    try:
        for variable, _ in before:
            _set_trainable(variable, id(variable) in wanted)
        yield
    finally:
        for variable, value in before:
            _set_trainable(variable, value)


def _set_trainable(variable, value):
    # PyTorch refuses even `False` for some dtypes.
    if variable.trainable != value:
        variable.trainable = value


def once(items):
    """Each once, in order."""
    return list({id(x): x for x in items}.values())
