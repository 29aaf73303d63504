"""One training stage: Keras' own `fit`, with an optimizer of its own, under watch."""

import itertools

import keras

from keras_rfattn.layers.batches import too_long
from keras_rfattn.uptraining.callbacks import NotFinite
from keras_rfattn.uptraining.callbacks import Save
from keras_rfattn.uptraining.callbacks import Watch
from keras_rfattn.uptraining.interrupts import Interrupts
from keras_rfattn.uptraining.resume import assign

# Learning rates of maps in stage "features" by what it compares.
FEATURES_RATES = {"features": 0.005, "logits": 0.001}
# Where a model's own weights train too: those of attention, or all of them.
OWN_RATE, ALL_RATE = 0.001, 0.0001
# Batches that are remembered, for errors.
AHEAD = 8


def fit_stage(
    trainer, variables, inputs, steps, optimizer, settings, save, resumed=None
):
    """Trains for the steps that are left.

    Args:
        trainer: A Keras model with a loss of its own, `variables` alone trainable.
        variables: Its trainable variables.
        inputs: `step -> iterator` over what the trainer takes, from a step on.
        steps: Of the stage.
        optimizer: A fresh one.
        settings: Arguments of `uptrain`.
        save: `(steps done, errors, optimizer)`, called now and then.
        resumed: `(steps done, values of the optimizer's variables, errors)`, or `None`.

    Returns:
        The errors of all steps of the stage.

    Raises:
        NotFinite: If a loss is not finite; the last good weights are in place.
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
        # TensorFlow hides errors of data behind its own.
        cause = failed[0] if failed else error
        cause.add_note(
            f"Training broke off after {watch.done} of the {steps} steps of "
            f"{type(trainer).__name__}, in the next batch perhaps; weights are as then."
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
    """The same batches; on TensorFlow a dataset whose sequences may differ in length.

    Keras looks at two batches there, and refuses what is longer than these.
    """
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    # Which takes a list for an array.
    batches = map(keras.tree.lists_to_tuples, batches)
    first = next(batches)

    def signature(x):
        # Images keep their size.
        lead = 2 if x.ndim in (2, 3) else 1
        return tf.TensorSpec((None,) * lead + x.shape[lead:], x.dtype)

    return tf.data.Dataset.from_generator(
        lambda: itertools.chain([first], batches),
        output_signature=keras.tree.map_structure(signature, first),
    )


def remembering(batches, failed, latest):
    """The same iterator; an error that ends it is kept in the list `failed`.

    The list `latest` holds the last batches: backends ask for some ahead.
    """
    try:
        for batch in batches:
            latest[:] = [*latest[1 - AHEAD :], batch]
            yield batch
    except Exception as error:
        failed.append(error)
        raise


def rate_for(stage, trainable, objective, layers):
    """The learning rate of a stage.

    Args:
        stage: `"attention"` or `"features"`.
        trainable: What trains in it, one of `selection.TRAINABLE`.
        objective: What stage `"features"` compares, as of `FeaturesStage`.
        layers: The linear layers.
    """
    if trainable == "all" and stage == "features":
        return ALL_RATE
    if trainable != "maps":
        return OWN_RATE
    if stage == "features":
        return FEATURES_RATES[objective]
    return min(x.feature_map.learning_rate for x in layers)


def optimizer_for(rate, steps, given, is_float16):
    """A fresh copy of the optimizer that was given, or the default one.

    Args:
        rate: Learning rate of the stage.
        steps: Of the stage.
        given: A Keras optimizer, or `None`.
        is_float16: Whether losses have to be scaled.
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
    """PyTorch keeps a gradient with each weight."""
    if keras.backend.backend() == "torch":
        variable.value.grad = None
