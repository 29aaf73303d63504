"""The settings of one call of `uptrain`, validated in one place."""

import os
from dataclasses import dataclass

import keras
from keras import ops

from keras_rfattn.arguments import check_seed, check_sizes, is_number

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
POSITIVE_INTEGERS = "steps", "batch_size", "save_every", "lora_rank", "max_rows"
# Keras saves the model that `fit` trains, which is the model of a stage here.
SAVING_CALLBACKS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


@dataclass(frozen=True)
class Settings:
    """The arguments of `uptrain`, except the model and its data.

    The constructor takes the arguments as users pass them to `uptrain`, and stores them
    in one form.

    Attributes:
        stages: Tuple of the names of the stages to run, in order.
        trainable: Dict from those of the stages that train to one of `TRAINABLE`.
        optimizer: A Keras optimizer, or `None` for the default one.
        seed: Integer, the seed of the order of the data and of window dropout.
        callbacks: Tuple of Keras callbacks.

    The other attributes are arguments of `uptrain` as they are.

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
    max_rows: int

    def __post_init__(self):
        check_sizes(**{name: getattr(self, name) for name in POSITIVE_INTEGERS})
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"`{name}` must be one of {choices}. Received: {name}={value!r}."
                )
        if not is_number(self.window_dropout) or not 0 <= self.window_dropout < 1:
            raise ValueError(
                "`window_dropout` must be in [0, 1). "
                f"Received: window_dropout={self.window_dropout!r}."
            )
        if not isinstance(self.checkpoint_dir, (str, os.PathLike, type(None))):
            raise ValueError(
                "`checkpoint_dir` must be a path. "
                f"Received: checkpoint_dir={self.checkpoint_dir!r:.80}."
            )
        check_seed(self.seed)
        seed = self.seed
        if seed is None and self.checkpoint_dir is not None:
            seed = 0
        elif seed is None:
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        stages, given = _stages(self.stages), self.optimizer
        normal = {
            "stages": stages,
            "trainable": _by_stage(self.trainable, stages),
            "callbacks": _callbacks(self.callbacks),
            "optimizer": None if given is None else keras.optimizers.get(given),
            # Checkpoints and reports store plain Python numbers.
            "window_dropout": float(self.window_dropout),
            "seed": int(seed),
            **{name: int(getattr(self, name)) for name in POSITIVE_INTEGERS},
        }
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
