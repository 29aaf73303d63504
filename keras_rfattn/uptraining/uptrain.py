"""Trains a converted linear model to match its softmax checkpoint: `uptrain`."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_rfattn.layers.batches import preprocessor_hint
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.models.swap import strategy_scope
from keras_rfattn.uptraining.batches import Batches
from keras_rfattn.uptraining.report import Clock, UptrainingReport
from keras_rfattn.uptraining.settings import Settings
from keras_rfattn.uptraining.stages import OPTIONS, Stage
from keras_rfattn.uptraining.training import Training
from keras_rfattn.uptraining.weights import variables_to_train


def uptrain(
    model: keras.layers.Layer,
    data: Any,
    steps: int,
    *,
    stages: Sequence[str | Stage] = tuple(OPTIONS),
    batch_size: int = 32,
    optimizer: Any = None,
    seed: int | None = None,
    callbacks: list | None = None,
    verbose: int | str = "auto",
) -> UptrainingReport:
    """Trains a model with linear attention to match its softmax checkpoint.

    The softmax checkpoint is the teacher and lives inside the same model: weights that
    do not train are shared, and for weights that train their first values are kept as
    copies.

    Dropout is inactive, and calibrated parameters that do not train keep their values.
    Maps train in a frozen model too, and are frozen again afterwards. A map does not
    train if its own `trainable` is False while its layer's is True.

    Args:
        model: A model changed by `replace_attention`.
        data: Anything `keras.Model.fit` takes; labels are ignored. It can be an array,
            a dict of arrays, `(x, y)`, a `keras.utils.PyDataset`, a `tf.data.Dataset`,
            a generator or a function that makes one, a list of batches, or texts or
            images for the model's own preprocessor.
        steps: Number of training steps in total, divided equally among the stages that
            train.
        stages: The stages to run: some of `"calibrate"`, `"attention"` and
            `"features"`, in this order. Each is a name, or a
            `keras_rfattn.uptraining.Stage` with options, such as which weights train.
        batch_size: Number of rows per batch when `data` is arrays or texts.
        optimizer: A Keras optimizer, its name or its config. Each stage starts with a
            fresh copy. The default is Adam with a cosine schedule that falls to a
            twentieth of the learning rate. That rate is the map's `learning_rate`
            (0.02, `"hedgehog"` 0.06) in stage `"attention"`, and 0.005 in `"features"`
            (0.001 if it compares logits). It is 0.001 if weights of the model itself
            train, and 0.0001 if all of them do.
        seed: Non-negative integer. The order of the data and window dropout are pure
            functions of the seed and the step. If `None`, it is drawn at random.
        callbacks: Keras callbacks for the stages that train. A
            `keras_rfattn.uptraining.Checkpoint` resumes an interrupted call. Callbacks
            that save the trained model are refused.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar for each stage, 2 for a
            line for each stage, as in `keras.Model.fit`.

    Returns:
        An `UptrainingReport`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no linear attention,
            nothing would train, the data does not fit the model or has no real token,
            or a `Checkpoint` belongs to another run; the model is unchanged in these
            cases. Also if a loss is not finite (the last good weights are kept), or if
            a weight of the teacher changes during training.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "hedgehog")
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 16))
        >>> report = keras_rfattn.uptrain(model, x, steps=2, batch_size=4, verbose=0)
        >>> [(stage.name, stage.steps) for stage in report.stages]
        [('attention', 1), ('features', 1)]
    """
    clock = Clock()
    check_model(model)
    layers = linear_layers(model)
    if not layers:
        raise ValueError(
            f"`model` has no linear attention to train. Received: {title(model)}. "
            "Call `keras_rfattn.replace_attention(model, 'hedgehog')` first."
        )
    settings = Settings.of(
        steps, stages, batch_size, optimizer, seed, callbacks, verbose
    )
    preprocessor, hint = getattr(model, "preprocessor", None), preprocessor_hint(model)
    batches = Batches(data, settings.batch_size, settings.seed, preprocessor, hint)
    with strategy_scope(model):
        return _run(model, layers, batches, settings, clock)


def _run(model, layers, batches, settings, clock):
    """Runs `uptrain` after its arguments were checked."""
    layers = in_order(model, layers, batches(0))
    beforehand = None
    if settings.adds_adapters:
        # Adapters cannot be removed again, so the data and the checkpoint are checked
        # before adapters are added.
        beforehand = Training(model, layers, {}, batches, settings, clock)
        beforehand.prepare()
    stages = settings.training_stages
    selected = variables_to_train(model, layers, stages, settings.optimizer)
    training = Training(model, layers, selected, batches, settings, clock)
    if beforehand is not None:
        # Fresh adapters do not change outputs, so the measurements still hold.
        training.take(beforehand)
    return training.run()
