"""What trains."""

import contextlib

from keras_rfattn.layers.checks import projection
from keras_rfattn.layers.checks import title

TRAINABLE = ("maps", "query_key", "lora", "all")


def chosen(model, layers, trainable, lora_rank, stages):
    """The variables that stages train, by name of the stage.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trainable: One of `TRAINABLE`.
        lora_rank: Rank of the adapters that `"lora"` adds where there are none.
        stages: Names of those that train.

    Raises:
        ValueError: If nothing is left to train in a stage.
    """
    if not stages:
        return {}
    maps = [v for layer in layers for v in layer.feature_map.variables if v.trainable]
    sides = once(projection(x, side) for x in layers for side in ("query", "key"))
    own = everything = []
    if trainable == "query_key":
        own = everything = [v for x in sides for v in x.variables if v.trainable]
    elif trainable == "lora":
        ends = [projection(x, side) for x in layers for side in ("value", "output")]
        for dense in once([*sides, *ends]):
            if not getattr(dense, "lora_enabled", False):
                dense.enable_lora(lora_rank)
        own, everything = (
            [v for x in denses for v in (x.lora_kernel_a, x.lora_kernel_b)]
            for denses in (sides, once([*sides, *ends]))
        )
    elif trainable == "all":
        of_maps = {id(v) for v in maps}
        own = [v for x in sides for v in x.variables if v.trainable]
        everything = [
            v for v in model.variables if v.trainable and id(v) not in of_maps
        ]
    found = {"attention": once([*maps, *own]), "features": once([*maps, *everything])}
    empty = [name for name in stages if not found[name]]
    if empty:
        mechanisms = sorted({type(x.feature_map).__name__ for x in layers})
        frozen = "" if trainable == "maps" else ", and its own weights are frozen"
        raise ValueError(
            f"Nothing would train in {empty}: {title(model)} has "
            f"{', '.join(mechanisms)}, without trainable weights{frozen}. Received: "
            f"trainable={trainable!r}. Use a learned map such as 'hedgehog', or "
            "trainable='query_key' with queries and keys whose `trainable` is True."
        )
    return {name: found[name] for name in stages}


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
