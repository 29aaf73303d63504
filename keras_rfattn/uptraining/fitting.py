"""Trains the model of a stage with Keras' `fit`."""

import math

import keras

from keras_rfattn.backend.devices import dataset_of, forget_gradients
from keras_rfattn.feature_maps.weights import assign

# Number of epochs that a stage is divided into, for callbacks that act by epoch.
EPOCHS = 10
# Learning rates of maps in stage "features", by its objective.
FEATURES_RATES = {"features": 0.005, "logits": 0.001}
# Learning rates if weights of the model itself train: of attention only, or all.
OWN_RATE, ALL_RATE = 0.001, 0.0001


def fit_stage(trainer, batches, optimizer, progress, callbacks, verbose):
    """Trains a stage for its remaining steps."""
    stage, first, steps = progress.stage, progress.first, progress.steps
    done, layers = len(progress.errors), trainer.learning
    rate = rate_for(stage, getattr(trainer, "objective", None), layers)
    is_float16 = any(layer.compute_dtype == "float16" for layer in layers)
    trainer.compile(optimizer=optimizer_for(rate, steps, optimizer, is_float16))
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
    try:
        trainer.fit(
            dataset_of(remaining),
            steps_per_epoch=per_epoch,
            initial_epoch=epoch,
            epochs=epoch + math.ceil((steps - done) / per_epoch),
            shuffle=False,
            callbacks=[*callbacks, progress],
            verbose=verbose,
        )
    finally:
        forget_gradients(trainer.trainable_variables)


def rate_for(stage, objective, layers):
    """Returns the default learning rate of a stage."""
    if stage.trainable == "all":
        return ALL_RATE
    if stage.trainable != "maps":
        return OWN_RATE
    if stage.name == "features":
        return FEATURES_RATES[objective]
    return min(layer.feature_map.learning_rate for layer in layers)


def optimizer_for(rate, steps, given, is_float16):
    """Returns a fresh copy of the given optimizer, or the default one."""
    if given is not None:
        optimizer = type(given).from_config(given.get_config())
    else:
        warmup = max(1, steps // 20)
        schedule = keras.optimizers.schedules.CosineDecay(
            rate / 20,
            max(1, steps - warmup),
            alpha=1 / 20,
            warmup_target=rate,
            warmup_steps=warmup,
        )
        optimizer = keras.optimizers.Adam(schedule)
    if is_float16 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
