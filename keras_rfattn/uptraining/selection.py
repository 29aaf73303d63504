"""What trains."""

import contextlib

import numpy as np
from keras import ops

from keras_rfattn.layers.checks import projection
from keras_rfattn.layers.checks import title
from keras_rfattn.models.holders import holders
from keras_rfattn.models.holders import refresh

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


def chosen(model, layers, trainable, lora_rank, stages, optimizer=None):
    """The variables that stages train, by name of the stage.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        trainable: One of `TRAINABLE` by name of the stage.
        lora_rank: Rank of the adapters that `"lora"` adds where there are none.
        stages: Names of those that train.
        optimizer: The user's, or `None`.

    Raises:
        ValueError: If nothing is left to train in a stage, a layer takes no adapter, or
            weights are too narrow for the default optimizer; before any adapter is
            added.
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
            f"{', '.join(mechanisms)}, without trainable weights{frozen}. Received: "
            f"trainable={asked!r}. Use a learned map such as 'hedgehog', whose "
            "`trainable` is True, or trainable='query_key' with such queries and keys."
        )
    if optimizer is None:
        _check_precision(v for x in found.values() for v in x)
    for stage in stages:
        if trainable[stage] == "lora":
            found[stage] = once([*maps, *_adapters(layers, stage, lora_rank)])
    return found


def learned(layer):
    """The weights of a layer's map that uptraining trains.

    Freezing a checkpoint freezes its maps too, and `uptrain` trains them nevertheless.
    A map that is frozen in a layer that is not was frozen on purpose, and stays so.
    """
    feature_map = layer.feature_map
    if layer.trainable or feature_map.trainable:
        return [v for v in feature_map.variables if v.trainable]
    parts = feature_map._flatten_layers()
    could = {id(v) for part in parts for v in part._trainable_variables}
    return [v for v in feature_map.variables if id(v) in could]


def _check_precision(variables):
    """Raises `ValueError` for weights that the default optimizer would not move."""
    narrow = [v for v in variables if v.dtype in ("float16", "bfloat16")]
    if narrow:
        raise ValueError(
            f"{len(narrow)} weights to train, such as {narrow[0].path!r}, are "
            f"{narrow[0].dtype}, which holds neither Adam's averages nor its small "
            "steps. Load the model with dtype='mixed_bfloat16', train the maps or "
            "trainable='lora', or pass an `optimizer` that you know to train them."
        )


def fresh_adapters(model):
    """Variables of adapters that change nothing yet: one side of each is 0."""
    layers = (x for x in model._flatten_layers() if getattr(x, "lora_enabled", False))
    return [
        v
        for x in layers
        if not np.any(ops.convert_to_numpy(x.lora_kernel_b))
        for v in (x.lora_kernel_a, x.lora_kernel_b)
    ]


def _own(model, layers, trainable, stage):
    """What trains in a stage besides maps; in `"attention"` queries and keys alone."""
    if trainable == "maps":
        return []
    if trainable == "all" and stage == "features":
        return [v for v in model.variables if v.trainable]
    return [v for x in _sides(layers) for v in x.variables if v.trainable]


def _sides(layers):
    return once(projection(x, side) for x in layers for side in ("query", "key"))


def _adapters(layers, stage, lora_rank):
    """Those of a stage, added to all projections where they are not there yet."""
    sides = _sides(layers)
    ends = [projection(x, side) for x in layers for side in ("value", "output")]
    everything = once([*sides, *ends])
    fresh = [x for x in everything if not getattr(x, "lora_enabled", False)]
    for dense in fresh:
        if getattr(dense, "kernel_constraint", None) is not None:
            raise ValueError(
                "Keras adds no adapter to a kernel with a constraint. Received: "
                f"trainable='lora', and {dense.path!r}, whose `kernel_constraint` is "
                f"{dense.kernel_constraint!r}. Set that to None, or train otherwise."
            )
    for dense in fresh:
        dense.enable_lora(lora_rank)
    for layer in holders(fresh):
        # Programs compiled without the adapters would never see them.
        refresh(layer)
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
