"""The settings of one call of `uptrain`, validated in one place."""

import os
from dataclasses import dataclass, fields

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import check_seed, is_integer, is_number

STAGES = ("calibrate", "attention", "features")
# The stages that train, in the order in which they run.
TRAINING_STAGES = ("attention", "features")
# The values that `trainable` takes for a stage.
TRAINABLE = ("maps", "query_key", "lora", "all")
CHOICES = {
    "objective": ("auto", "features", "logits"),
    "verbose": ("auto", 0, 1, 2),
    "jit_compile": ("auto", True, False),
}
POSITIVE_INTEGERS = ("steps", "batch_size", "save_every", "lora_rank")
# Keras saves the model that `fit` trains, which is the model of a stage here.
SAVING_CALLBACKS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


@dataclass(frozen=True)
class Settings:
    """The arguments of `uptrain`, except the model and its data.

    The constructor takes the arguments as users pass them to `uptrain`, and stores them
    in one form.

    Attributes:
        steps: Number of training steps of all stages together.
        stages: Tuple of the names of the stages to run, in order.
        trainable: Dict from those of the stages that train to one of `TRAINABLE`.
        batch_size: Number of rows per batch if the data holds rows.
        optimizer: A Keras optimizer, or `None` for the default one.
        seed: Seed of the order of the data and of window dropout.
        callbacks: Tuple of Keras callbacks.
        verbose: 0, 1, 2 or `"auto"`, as in `keras.Model.fit`.
        objective: `"auto"`, `"features"` or `"logits"`.
        window_dropout: Share of sequences or batches that leave windows out.
        lora_rank: Rank of new adapters.
        checkpoint_dir: Path of the folder for checkpoints, or `None`.
        save_every: Number of steps between checkpoints.
        jit_compile: Passed to `keras.Model.compile`.

    Raises:
        ValueError: If an argument is invalid.
    """

    steps: int
    stages: tuple
    trainable: dict
    batch_size: int
    optimizer: object
    seed: int
    callbacks: tuple
    verbose: object
    objective: str
    window_dropout: float
    lora_rank: int
    checkpoint_dir: object
    save_every: int
    jit_compile: object

    def __post_init__(self):
        normal = {field.name: getattr(self, field.name) for field in fields(self)}
        normal["stages"] = _stages(self.stages)
        normal["trainable"] = _by_stage(self.trainable, normal["stages"])
        normal["callbacks"] = _callbacks(self.callbacks)
        _check_choices(normal)
        # Checkpoints and reports store plain Python numbers.
        for name in POSITIVE_INTEGERS:
            normal[name] = _positive_integer(name, normal[name])
        normal["window_dropout"] = _share("window_dropout", self.window_dropout)
        _check_path("checkpoint_dir", self.checkpoint_dir)
        if self.optimizer is not None:
            normal["optimizer"] = keras.optimizers.get(self.optimizer)
        normal["seed"] = _seed(self.seed, is_resumable=self.checkpoint_dir is not None)
        for name, value in normal.items():
            # Assignment to a frozen dataclass must bypass its own check.
            object.__setattr__(self, name, value)

    @property
    def adds_adapters(self):
        """Whether a stage adds LoRA adapters to the model."""
        return "lora" in self.trainable.values()


def _listed(given):
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _stages(given):
    stages = _listed(given)
    if not stages or stages != tuple(x for x in STAGES if x in stages):
        raise ValueError(
            f"`stages` must be some of {STAGES}, each at most once and in this order. "
            f"Received: stages={given!r}."
        )
    return stages


def _by_stage(given, stages):
    """Returns a dict from those of the stages that train to what trains in them."""
    by_stage = (
        given if isinstance(given, dict) else dict.fromkeys(TRAINING_STAGES, given)
    )
    for stage, trainable in by_stage.items():
        if stage not in TRAINING_STAGES or trainable not in TRAINABLE:
            raise ValueError(
                f"`trainable` must be one of {TRAINABLE}, or a dict from the names of "
                f"stages that train, {TRAINING_STAGES}, to one of these. "
                f"Received: trainable={given!r}."
            )
    # Stages that a dict lacks train maps.
    return {x: by_stage.get(x, "maps") for x in TRAINING_STAGES if x in stages}


def _callbacks(given):
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    callbacks = () if given is None else _listed(given)
    others = [x for x in callbacks if not isinstance(x, keras.callbacks.Callback)]
    if others:
        raise ValueError(
            f"`callbacks` must be Keras callbacks. Received: callbacks={others!r:.80}."
        )
    savers = [type(x).__name__ for x in callbacks if isinstance(x, SAVING_CALLBACKS)]
    if savers:
        raise ValueError(
            "`callbacks` must not save the model that `fit` trains, because it is the "
            f"model of a stage here and not yours. Received: {savers}. Pass "
            "`checkpoint_dir=` to resume after an interruption, and save your model "
            "when `uptrain` is done."
        )
    return callbacks


def _check_choices(arguments):
    for name, choices in CHOICES.items():
        value = arguments[name]
        if value not in choices:
            raise ValueError(
                f"`{name}` must be one of {choices}. Received: {name}={value!r}."
            )


def _positive_integer(name, value):
    if not is_integer(value) or value < 1:
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}={value!r}."
        )
    return int(value)


def _share(name, value):
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={value!r}.")
    return float(value)


def _check_path(name, value):
    if not isinstance(value, (str, os.PathLike, type(None))):
        raise ValueError(f"`{name}` must be a path. Received: {name}={value!r:.80}.")


def _seed(seed, is_resumable):
    """Returns the seed as an integer; a random one if the run cannot be resumed."""
    check_seed(seed)
    if seed is None and is_resumable:
        seed = 0
    if seed is None:
        seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
    return int(seed)
