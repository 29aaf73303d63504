"""Runs one training stage with Keras' `fit` and a fresh optimizer."""

import itertools

import keras

from keras_rfattn.layers.batches import too_long
from keras_rfattn.uptraining.callbacks import NotFinite, Save, Watch
from keras_rfattn.uptraining.interrupts import Interrupts
from keras_rfattn.uptraining.resume import assign

# Learning rates of maps in stage "features", by its objective.
FEATURES_RATES = {"features": 0.005, "logits": 0.001}
# Learning rates if weights of the model itself train: of attention only, or all.
OWN_RATE, ALL_RATE = 0.001, 0.0001
# Number of recent batches that are kept to explain errors.
AHEAD = 8


def fit_stage(
    trainer, variables, inputs, steps, optimizer, settings, save, resumed=None
):
    """Trains a stage for its remaining steps.

    Args:
        trainer: A Keras model with its own loss, in which only `variables` train.
        variables: List of its trainable variables.
        inputs: Function that takes the number of a step and returns an iterator over
            the trainer's batches from that step on.
        steps: Number of steps of the stage.
        optimizer: A fresh Keras optimizer.
        settings: Dict of arguments of `uptrain`.
        save: Function called with `(steps done, errors, optimizer)` every `save_every`
            steps.
        resumed: `(steps done, values of the optimizer's variables, errors)` from a
            checkpoint, or `None`.

    Returns:
        List of the errors of all steps of the stage.

    Raises:
        NotFinite: If a loss is not finite. The model then has its last good weights.
    """
    done, slots, errors = resumed or (0, None, [])
    trainer.compile(optimizer=optimizer, jit_compile=settings["jit_compile"])
    optimizer.build(trainer.trainable_variables)
    if slots is not None:
        assign(optimizer.variables, slots)
    watch = Watch(variables, done, list(errors))
    interrupts = Interrupts()
    saving = Save(
        watch, interrupts, lambda *x: save(*x, optimizer), settings["save_every"], steps
    )
    failed, latest = [], []
    try:
        if done < steps:
            with interrupts.held():
                trainer.fit(
                    as_dataset(remembering(inputs(done), failed, latest)),
                    steps_per_epoch=steps - done,
                    shuffle=False,
                    callbacks=[watch, *settings["callbacks"], saving],
                    verbose=settings["verbose"],
                )
            watch.check_weights()
    except NotFinite as error:
        assign(variables, watch.good)
        error.step = watch.done
        raise
    except Exception as error:
        # TensorFlow replaces errors of the data iterator by errors of its own.
        cause = failed[0] if failed else error
        cause.add_note(
            f"{type(trainer).__name__} stopped after {watch.done} of {steps} steps, "
            "possibly because of the next batch. The model keeps the weights so far."
        )
        hints = [too_long(trainer.model, x["x"]) for (x,) in latest]
        if any(hints):
            cause.add_note(max(hints))
        if failed:
            raise cause from None
        raise
    finally:
        for variable in variables:
            _forget_gradient(variable)
    return watch.errors


def as_dataset(batches):
    """Returns the batches, on TensorFlow as a dataset of variable sequence length.

    From a plain iterator, Keras infers shapes from two batches there, and refuses
    longer sequences afterwards.
    """
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    # TensorFlow would turn a list of arrays into one array.
    batches = map(keras.tree.lists_to_tuples, batches)
    first = next(batches)

    def signature(x):
        # Batch and token axes may vary; images have more axes and keep their size.
        lead = 2 if x.ndim in (2, 3) else 1
        return tf.TensorSpec((None,) * lead + x.shape[lead:], x.dtype)

    return tf.data.Dataset.from_generator(
        lambda: itertools.chain([first], batches),
        output_signature=keras.tree.map_structure(signature, first),
    )


def remembering(batches, failed, latest):
    """Iterates over batches, and remembers the latest ones and an error.

    Args:
        batches: Iterator over batches.
        failed: List to which an error of the iterator is added.
        latest: List that holds the last `AHEAD` batches. It needs several, because
            backends fetch batches ahead of the step that fails.
    """
    try:
        for batch in batches:
            latest[:] = [*latest[1 - AHEAD :], batch]
            yield batch
    except Exception as error:
        failed.append(error)
        raise


def rate_for(stage, trainable, objective, layers):
    """Returns the learning rate of a stage.

    Args:
        stage: `"attention"` or `"features"`.
        trainable: What trains in it, one of `selection.TRAINABLE`.
        objective: What stage `"features"` compares: `"features"` or `"logits"`.
        layers: The linear attention layers.
    """
    if trainable == "all" and stage == "features":
        return ALL_RATE
    if trainable != "maps":
        return OWN_RATE
    if stage == "features":
        return FEATURES_RATES[objective]
    return min(x.feature_map.learning_rate for x in layers)


def optimizer_for(rate, steps, given, is_float16):
    """Returns a fresh copy of the given optimizer, or the default one.

    Args:
        rate: Learning rate of the stage, for the default optimizer.
        steps: Number of steps of the stage.
        given: A Keras optimizer, or `None`.
        is_float16: Whether layers compute in float16, which requires loss scaling.
    """
    if given is not None:
        optimizer = type(given).from_config(given.get_config())
    else:
        warmup = max(1, steps // 20)
        optimizer = keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(
                rate / 20, max(1, steps - warmup), alpha=1 / 20, warmup_target=rate,
                warmup_steps=warmup,
            )
        )  # fmt: skip
    if is_float16 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _forget_gradient(variable):
    """Frees the gradient that PyTorch keeps with the variable."""
    if keras.backend.backend() == "torch":
        variable.value.grad = None
