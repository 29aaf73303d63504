"""The settings of one call of `uptrain`, validated in one place."""

from typing import NamedTuple

import keras
from keras import ops

from keras_rfattn.arguments import check_seed, check_sizes
from keras_rfattn.uptraining.resume import Checkpoint
from keras_rfattn.uptraining.stages import OPTIONS, Stage

# Keras saves the model that `fit` trains, which is the model of a stage here.
SAVING_CALLBACKS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


class Settings(NamedTuple):
    """The arguments of `uptrain`, except the model and its data, each in one form."""

    steps: int
    stages: tuple  # of `Stage`
    batch_size: int
    optimizer: object  # `None` for the default one
    seed: int
    callbacks: tuple  # without the checkpoint
    checkpoint: object  # `None` if nothing is saved
    verbose: object

    @classmethod
    def of(cls, steps, stages, batch_size, optimizer, seed, callbacks, verbose):
        """Checks the arguments of `uptrain`, and returns its settings."""
        check_sizes(steps=steps, batch_size=batch_size)
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(
                f"`verbose` must be 'auto', 0, 1 or 2. Received: verbose={verbose!r}."
            )
        check_seed(seed)
        stages, (callbacks, checkpoint) = _stages(stages), _callbacks(callbacks)
        if optimizer is not None:
            optimizer = keras.optimizers.get(optimizer)
        if seed is None and checkpoint is not None:
            seed = 0
        elif seed is None:
            seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
        # Checkpoints and reports store plain Python numbers.
        steps, batch_size, seed = int(steps), int(batch_size), int(seed)
        return cls(
            steps, stages, batch_size, optimizer, seed, callbacks, checkpoint, verbose
        )

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
