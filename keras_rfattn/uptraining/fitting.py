"""Trains the model of a stage with Keras' `fit`."""

import math

import keras

from keras_rfattn.backend.devices import dataset_of
from keras_rfattn.feature_maps.weights import assign

# Number of epochs that a stage is divided into, for callbacks that act by epoch.
EPOCHS = 10


def fit_stage(trainer, batches, optimizer, progress, callbacks, verbose):
    """Trains a stage for its remaining steps."""
    stage, first, steps = progress.stage, progress.first, progress.steps
    done, layers = len(progress.errors), trainer.learning
    rates = {"maps": trainer.rate_of_maps, "query_key": 0.001, "all": 0.0001}
    optimizer = optimizer_for(rates[stage.trainable], steps, optimizer)
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    is_float16 = any(layer.compute_dtype == "float16" for layer in layers)
    if is_float16 and not scales_loss:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    trainer.compile(optimizer)
    trainer.optimizer.build(trainer.trainable_variables)
    if progress.optimizer_values:
        assign(trainer.optimizer.variables, progress.optimizer_values)
    if verbose:
        control = f"{trainer.measure} (no attention {trainer.no_attention:.3f})"
        print(f"Stage '{stage.name}', {steps - done} steps: {control}")

    remaining = (
        (batches.with_noise(step, len(layers) + 1),)
        for step in range(first + done, first + steps)
    )
    per_epoch = math.ceil(steps / EPOCHS)
    # Epochs are counted on from those of the stages before.
    epoch = math.ceil(first / per_epoch) + done // per_epoch
    trainer.fit(
        dataset_of(remaining),
        steps_per_epoch=per_epoch,
        initial_epoch=epoch,
        epochs=epoch + math.ceil((steps - done) / per_epoch),
        shuffle=False,
        callbacks=[*callbacks, progress],
        verbose=verbose,
    )


def optimizer_for(rate, steps, given):
    """Returns a fresh copy of the given optimizer, or the default one."""
    if given is not None:
        return type(given).from_config(given.get_config())
    warmup = max(1, steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        rate / 20,
        max(1, steps - warmup),
        alpha=1 / 20,
        warmup_target=rate,
        warmup_steps=warmup,
    )
    return keras.optimizers.Adam(schedule)
