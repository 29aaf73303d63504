"""The settings of one call of `uptrain`, validated in one place."""

from dataclasses import dataclass, field

import keras
from keras import ops

from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.layers.checks import check_sizes
from keras_rfattn.uptraining.resume import Checkpoint
from keras_rfattn.uptraining.stages import OPTIONS, Stage

# Keras saves the model that `fit` trains, which is the model of a stage here.
SAVING_CALLBACKS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


@dataclass(frozen=True)
class Settings:
    """The arguments of `uptrain`, except the model and its data.

    The constructor takes the arguments as users pass them to `uptrain`, and stores them
    in one form.

    Attributes:
        stages: Tuple of the `Stage`s to run, in order.
        optimizer: A Keras optimizer, or `None` for the default one.
        seed: Integer, the seed of the order of the data and of window dropout.
        callbacks: Tuple of Keras callbacks, without the `Checkpoint`.
        checkpoint: The `Checkpoint` among the callbacks, or `None`.

    The other attributes are arguments of `uptrain` as they are.

    Raises:
        ValueError: If an argument is invalid.
    """

    steps: int
    stages: tuple
    batch_size: int
    optimizer: object
    seed: int
    callbacks: tuple
    verbose: object
    checkpoint: object = field(init=False)

    def __post_init__(self):
        check_sizes(steps=self.steps, batch_size=self.batch_size)
        if self.verbose not in ("auto", 0, 1, 2):
            raise ValueError(
                "`verbose` must be 'auto', 0, 1 or 2. "
                f"Received: verbose={self.verbose!r}."
            )
        check_seed(self.seed)
        callbacks, checkpoint = _callbacks(self.callbacks)
        seed, given = self.seed, self.optimizer
        if seed is None and checkpoint is not None:
            seed = 0
        elif seed is None:
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        normal = {
            # Checkpoints and reports store plain Python numbers.
            "steps": int(self.steps),
            "stages": _stages(self.stages),
            "batch_size": int(self.batch_size),
            "optimizer": None if given is None else keras.optimizers.get(given),
            "seed": int(seed),
            "callbacks": callbacks,
            "checkpoint": checkpoint,
        }
        for name, value in normal.items():
            # Assignment to a frozen dataclass must bypass its own check.
            object.__setattr__(self, name, value)

    @property
    def training_stages(self):
        """The stages that train with gradients."""
        return [stage for stage in self.stages if stage.trains]

    @property
    def adds_adapters(self):
        """Whether a stage adds LoRA adapters to the model."""
        return any(stage.trainable == "lora" for stage in self.stages)


def _listed(x):
    return tuple(x) if isinstance(x, (list, tuple)) else (x,)


def _stages(given):
    """Returns a tuple of `Stage`s from stages and names of stages."""
    stages = tuple(x if isinstance(x, Stage) else Stage(x) for x in _listed(given))
    names = tuple(stage.name for stage in stages)
    if not names or names != tuple(x for x in OPTIONS if x in names):
        raise ValueError(
            f"`stages` must be some of {tuple(OPTIONS)}, each at most once and in this "
            f"order. Received: stages={given!r}."
        )
    ranks = [stage.lora_rank for stage in stages if stage.trainable == "lora"]
    if len(set(ranks)) > 1:
        raise ValueError(
            "`lora_rank` must be the same in all stages, because they train the same "
            f"adapters. Received: {ranks}."
        )
    return stages


def _callbacks(given):
    """Returns a tuple of Keras callbacks, and the `Checkpoint` among them or `None`."""
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
            f"model of a stage here and not yours. Received: {savers}. Use "
            "`keras_rfattn.uptraining.Checkpoint` to resume after an interruption, and "
            "save your model when `uptrain` is done."
        )
    checkpoints = [x for x in callbacks if isinstance(x, Checkpoint)]
    if len(checkpoints) > 1:
        raise ValueError(
            "`callbacks` must hold at most one `Checkpoint`. "
            f"Received: {len(checkpoints)}."
        )
    callbacks = tuple(x for x in callbacks if x not in checkpoints)
    return callbacks, checkpoints[0] if checkpoints else None
