"""Selects the variables that each stage trains."""

import contextlib

import numpy as np
from keras import ops

from keras_rfattn.layers.checks import projection, title
from keras_rfattn.models.holders import holders, refresh

TRAINABLE = ("maps", "query_key", "lora", "all")
# The stages that train, in the order in which they run.
STAGES = ("attention", "features")


def by_stage(trainable):
    """Returns a dict that says for each stage which of `TRAINABLE` trains in it.

    Args:
        trainable: One of `TRAINABLE` for all stages, or a dict by stage; stages that
            the dict lacks train maps.

    Raises:
        ValueError: If `trainable` is neither.
    """
    given = (
        trainable if isinstance(trainable, dict) else dict.fromkeys(STAGES, trainable)
    )
    for stage, what in given.items():
        if stage not in STAGES or what not in TRAINABLE:
            raise ValueError(
                f"`trainable` must be one of {TRAINABLE}, or a dict that gives one for "
                f"each stage of {STAGES}. Received: trainable={trainable!r}."
            )
    return {stage: given.get(stage, TRAINABLE[0]) for stage in STAGES}


def chosen(model, layers, trainable, lora_rank, stages, optimizer=None):
    """Selects the variables that each stage trains, and adds adapters for `"lora"`.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trainable: Dict from names of stages to one of `TRAINABLE`.
        lora_rank: Rank of the adapters that `"lora"` adds to projections without one.
        stages: Names of the stages that train.
        optimizer: The user's optimizer, or `None` for the default one.

    Returns:
        Dict from names of stages to lists of variables.

    Raises:
        ValueError: If nothing trains in a stage, a layer cannot take an adapter, or
            the dtype of weights is too narrow for the default optimizer. No adapter
            has been added then.
    """
    maps = [v for layer in layers for v in learned(layer)]
    found = {}
    for stage in stages:
        if trainable[stage] != "lora":
            own = _own(model, layers, trainable[stage], stage)
            found[stage] = once([*maps, *own])
    empty = [name for name in found if not found[name]]
    if empty:
        mechanisms = sorted({type(x.feature_map).__name__ for x in layers})
        asked = trainable[empty[0]]
        frozen = "" if asked == "maps" else ", and its own weights are frozen"
        raise ValueError(
            f"Nothing would train in {empty}: {title(model)} has "
            f"{', '.join(mechanisms)} without trainable weights{frozen}. Received: "
            f"trainable={asked!r}. Use a learned map such as 'hedgehog', or "
            "trainable='query_key', in layers that are not frozen."
        )
    if optimizer is None:
        _check_precision(v for x in found.values() for v in x)
    for stage in stages:
        if trainable[stage] == "lora":
            found[stage] = once([*maps, *_adapters(layers, stage, lora_rank)])
    return found


def learned(layer):
    """Returns the weights of a layer's map that uptraining trains.

    Freezing a checkpoint freezes its maps too, but `uptrain` trains them nevertheless.
    If only the map is frozen and its layer is not, the user froze it on purpose, and
    it does not train.
    """
    feature_map = layer.feature_map
    if layer.trainable or feature_map.trainable:
        return [v for v in feature_map.variables if v.trainable]
    parts = feature_map._flatten_layers()
    could = {id(v) for part in parts for v in part._trainable_variables}
    return [v for v in feature_map.variables if id(v) in could]


def _check_precision(variables):
    """Raises `ValueError` if weights are too narrow for the default optimizer."""
    narrow = [v for v in variables if v.dtype in ("float16", "bfloat16")]
    if narrow:
        raise ValueError(
            f"{len(narrow)} weights to train, such as {narrow[0].path!r}, are "
            f"{narrow[0].dtype}, which is too coarse for the averages and the small "
            "steps of Adam. Load the model with dtype='mixed_bfloat16', train the maps "
            "or trainable='lora', or pass an `optimizer` that can train them."
        )


def fresh_adapters(model):
    """Returns variables of adapters that do not change outputs, as one side is 0."""
    layers = (x for x in model._flatten_layers() if getattr(x, "lora_enabled", False))
    return [
        v
        for x in layers
        if not np.any(ops.convert_to_numpy(x.lora_kernel_b))
        for v in (x.lora_kernel_a, x.lora_kernel_b)
    ]


def _own(model, layers, trainable, stage):
    """Returns the variables that train in a stage besides those of maps.

    In stage `"attention"` these are at most the query and key projections.
    """
    if trainable == "maps":
        return []
    if trainable == "all" and stage == "features":
        return [v for v in model.variables if v.trainable]
    return [v for x in _sides(layers) for v in x.variables if v.trainable]


def _sides(layers):
    return once(projection(x, side) for x in layers for side in ("query", "key"))


def _adapters(layers, stage, lora_rank):
    """Adds adapters to projections that have none; returns those the stage trains."""
    sides = _sides(layers)
    ends = [projection(x, side) for x in layers for side in ("value", "output")]
    everything = once([*sides, *ends])
    fresh = [x for x in everything if not getattr(x, "lora_enabled", False)]
    for dense in fresh:
        if getattr(dense, "kernel_constraint", None) is not None:
            raise ValueError(
                "Keras cannot add an adapter to a kernel with a constraint. "
                f"Received: trainable='lora', and {dense.path!r}, whose "
                f"`kernel_constraint` is "
                f"{dense.kernel_constraint!r}. Set it to None, or change `trainable`."
            )
    for dense in fresh:
        dense.enable_lora(lora_rank)
    for layer in holders(fresh):
        # Functions compiled before would keep running without the adapters.
        refresh(layer)
    taken = everything if stage == "features" else sides
    return [v for x in taken for v in (x.lora_kernel_a, x.lora_kernel_b)]


@contextlib.contextmanager
def only_training(model, variables):
    """Context manager in which only the given variables of a model are trainable."""
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
    # For some dtypes PyTorch raises even if `value` is `False`.
    if variable.trainable != value:
        variable.trainable = value


def once(items):
    """Returns the items in order, without repeated ones (compared by identity)."""
    return list({id(x): x for x in items}.values())
