"""Trains a converted linear model to match its softmax checkpoint: `uptrain`."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_rfattn.layers.batches import preprocessor_hint
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.models.swap import strategy_scope
from keras_rfattn.uptraining.batches import Batches
from keras_rfattn.uptraining.report import Clock, UptrainingReport
from keras_rfattn.uptraining.settings import STAGES, Settings
from keras_rfattn.uptraining.training import Training
from keras_rfattn.uptraining.weights import variables_to_train


def uptrain(
    model: keras.layers.Layer,
    data: Any,
    *,
    steps: int,
    stages: Sequence[str] = STAGES,
    trainable: str | dict = "maps",
    batch_size: int = 32,
    optimizer: Any = None,
    seed: int | None = None,
    callbacks: list | None = None,
    verbose: int | str = "auto",
    objective: str = "auto",
    window_dropout: float = 0.25,
    lora_rank: int = 8,
    exclude: Sequence[str] | None = None,
    preprocessor: Callable | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    save_every: int = 100,
    jit_compile: bool | str = "auto",
    max_rows: int = 512,
) -> UptrainingReport:
    """Trains a model with linear attention to match its softmax checkpoint.

    The softmax checkpoint is the teacher and lives inside the same model: weights that
    do not train are shared, and for weights that train their first values are kept as
    copies. There are three stages, and each can be used alone:

    - `"calibrate"`: Runs `keras_rfattn.calibrate` on the first batches, without
      gradients. The stage is skipped if no map learns in this way. It keeps maps that
      were trained, and it keeps an earlier calibration if a new one would raise the
      error; the report says so.
    - `"attention"`: Trains every layer against the softmax attention of the same
      layer, on the inputs that the layer has in the softmax model. The loss is the
      relative squared error of outputs plus the divergence of attention rows (of
      `max_rows` query rows if a sequence is longer).
    - `"features"`: Trains the linear model end to end against the softmax model, by
      last hidden states or by logits.

    Dropout is inactive, and stored statistics of maps keep their calibrated values.
    Maps train in a frozen model too, and are frozen again afterwards. A map does not
    train if its own `trainable` is False while its layer's is True.

    Args:
        model: A model changed by `replace_attention`.
        data: Anything `keras.Model.fit` takes; labels are ignored. It can be an array,
            a dict of arrays, `(x, y)`, a `keras.utils.PyDataset`, a `tf.data.Dataset`,
            a generator or a function that makes one, a list of batches, or texts or
            images for the model's own preprocessor.
        steps: Number of training steps in total, divided equally among the stages that
            train. If it exceeds the steps of the run in `checkpoint_dir`, that run is
            extended.
        stages: Names of the stages to run, in the order above.
        trainable: What trains: `"maps"` (weights of feature maps only), `"query_key"`
            (maps and the query and key projections), `"lora"` (maps and adapters that
            Keras' `enable_lora` adds to query, key, value and output projections) or
            `"all"` (maps and all other trainable weights of the model). It can also be
            a dict by stage, such as `{"attention": "maps", "features": "all"}`. Stage
            `"attention"` trains at most maps, queries and keys.
        batch_size: Number of rows per batch when `data` is arrays or texts.
        optimizer: A Keras optimizer, its name or its config. Each stage starts with a
            fresh copy. The default is Adam with a cosine schedule that falls to a
            twentieth of the learning rate. That rate is the map's `learning_rate`
            (0.02, `"hedgehog"` 0.06) in stage `"attention"`, and 0.005 in `"features"`
            (0.001 if it compares logits). It is 0.001 if weights of the model itself
            train, and 0.0001 if all of them do.
        seed: Non-negative integer. The order of the data and window dropout are pure
            functions of the seed and the step. If `None`, it is drawn at random, or 0
            with a `checkpoint_dir`.
        callbacks: Keras callbacks for the stages that train. Callbacks that save the
            trained model are refused; use `checkpoint_dir` instead.
        verbose: 0 for silent, 1 or `"auto"` for progress bars, 2 for a line every ten
            steps, with an estimate of the time that is left.
        objective: What stage `"features"` compares: `"features"` (hidden states, of
            the backbone if the model is a task), `"logits"`, or `"auto"`: logits for
            language models, hidden states for other models.
        window_dropout: Share of sequences (stage `"attention"`) or batches (stage
            `"features"`) for which a layer leaves its window out, so that its
            features learn too.
        lora_rank: Rank of new adapters.
        exclude: Texts that must not be trained on, such as evaluation texts. Texts in
            `data` that match, ignoring case, spaces and punctuation, are dropped and
            counted.
        preprocessor: Function that turns raw data into model inputs; by default the
            model's own preprocessor. If given, it is applied to all data.
        checkpoint_dir: Folder for checkpoints. A call that finds a checkpoint there
            resumes from it, and ends with the weights of an uninterrupted run. If
            `steps` exceeds the steps of that run, the run first ends as planned. The
            additional steps then form another round: they repeat the training stages
            on the batches that come next, each with a fresh optimizer and a restarted
            learning rate schedule.
        save_every: Number of steps between checkpoints.
        jit_compile: Passed to `keras.Model.compile`.
        max_rows: Largest number of query rows of a sequence that stage `"attention"`
            compares. They are spread evenly and shift from step to step. Time and
            memory of the comparison are proportional to it; 128 halves the time of a
            step for a decoder at 1024 tokens.

    Returns:
        An `UptrainingReport`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no linear attention,
            nothing would train, the data does not fit the model or has no real token,
            or `checkpoint_dir` holds another training or one with more steps; the
            model is unchanged in these cases. Also if a loss is not finite (the last
            good weights are kept), or if a weight of the teacher changes during
            training.

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
    settings = Settings(
        steps=steps,
        stages=stages,
        trainable=trainable,
        batch_size=batch_size,
        optimizer=optimizer,
        seed=seed,
        callbacks=callbacks,
        verbose=verbose,
        objective=objective,
        window_dropout=window_dropout,
        lora_rank=lora_rank,
        checkpoint_dir=checkpoint_dir,
        save_every=save_every,
        jit_compile=jit_compile,
        max_rows=max_rows,
    )
    _warn_of_another_teacher(model, layers)
    preprocesses_all = preprocessor is not None
    if preprocessor is None:
        preprocessor = getattr(model, "preprocessor", None)
    batches = Batches(
        data,
        settings.batch_size,
        settings.seed,
        preprocessor,
        exclude,
        preprocesses_all,
        preprocessor_hint(model),
    )
    with strategy_scope(model):
        return _run(model, layers, batches, settings, clock)


def _run(model, layers, batches, settings, clock):
    """Runs `uptrain` after its arguments were checked."""
    layers = in_order(model, layers, batches(0))
    beforehand = None
    if settings.adds_adapters:
        # Adapters cannot be removed again, so data and checkpoints are checked before
        # adapters are added.
        beforehand = Training(model, layers, {}, batches, settings, clock)
        beforehand.prepare()
    selected = variables_to_train(
        model, layers, settings.trainable, settings.lora_rank, settings.optimizer
    )
    training = Training(model, layers, selected, batches, settings, clock)
    if beforehand is not None:
        # Fresh adapters do not change outputs, so the measurements still hold.
        training.take(beforehand)
    try:
        report = training.run()
    finally:
        # `restore_attention` cannot undo these changes, even if training broke off.
        changed = training.teacher.changed()
        for layer in linear_layers(model):
            layer.trained = tuple(dict.fromkeys((*layer.trained, *changed)))
    steps = sum(stage.steps for stage in report.stages)
    if steps:
        for layer in layers:
            earlier = [layer.origin] if layer.origin else []
            layer.origin = ", then ".join([*earlier, f"{steps} steps of uptrain"])
    return report


def _warn_of_another_teacher(model, layers):
    changed = sorted({path for layer in layers for path in layer.trained})
    if changed:
        warnings.warn(
            f"{len(changed)} own weights of {title(model)}, such as {changed[0]!r}, "
            "were trained after attention was replaced. The teacher is softmax "
            "attention with their current values, not the checkpoint's. To use the "
            "checkpoint as the teacher, run all stages in one call, or load the "
            "checkpoint again.",
            stacklevel=3,
        )
