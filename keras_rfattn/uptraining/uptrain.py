"""Trains a converted linear model to match its softmax checkpoint: `uptrain`."""

import os
import warnings

import keras
import numpy as np
from keras import ops

from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.layers.batches import preprocessor_hint
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.models.strategy import strategy_scope
from keras_rfattn.uptraining.clock import Clock
from keras_rfattn.uptraining.data import Batches
from keras_rfattn.uptraining.features import OBJECTIVES
from keras_rfattn.uptraining.selection import by_stage, chosen
from keras_rfattn.uptraining.training import Training

STAGES = ("calibrate", "attention", "features")
ORDERS = ("together", "bottom_up")
VERBOSITIES = ("auto", 0, 1, 2)
COMPILING = ("auto", True, False)
INTEGERS = ("steps", "batch_size", "save_every", "lora_rank")


def uptrain(
    model,
    data,
    *,
    steps,
    stages=STAGES,
    trainable="maps",
    batch_size=32,
    optimizer=None,
    seed=None,
    callbacks=None,
    verbose="auto",
    order="together",
    objective="auto",
    window_dropout=0.25,
    lora_rank=8,
    exclude=None,
    preprocessor=None,
    checkpoint_dir=None,
    save_every=100,
    jit_compile="auto",
):
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
      relative squared error of outputs plus the divergence of attention rows (of 512
      query rows if a sequence is longer).
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
        verbose: Verbosity as in `keras.Model.fit`: 0, 1, 2 or `"auto"`.
        order: `"together"` trains all layers side by side in stage `"attention"`.
            `"bottom_up"` trains one layer after the other, each on the outputs of the
            trained linear layers below it.
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
    settings = {
        "steps": steps, "stages": _listed(stages), "trainable": by_stage(trainable),
        "order": order, "objective": objective, "window_dropout": window_dropout,
        "lora_rank": lora_rank, "batch_size": batch_size, "save_every": save_every,
        "optimizer": None if optimizer is None else keras.optimizers.get(optimizer),
        "callbacks": _callbacks(callbacks), "verbose": verbose,
        "checkpoint_dir": checkpoint_dir, "jit_compile": jit_compile,
    }  # fmt: skip
    check_model(model)
    layers = linear_layers(model)
    _check(model, layers, settings)
    check_seed(seed)
    if seed is None and checkpoint_dir is not None:
        seed = 0
    if seed is None:
        seed = ops.convert_to_numpy(keras.random.SeedGenerator().state)[0]
    # Checkpoints and reports store plain Python numbers.
    for name in INTEGERS:
        settings[name] = int(settings[name])
    settings["window_dropout"] = float(window_dropout)
    batch_size, seed = settings["batch_size"], int(seed)
    _warn_of_another_teacher(model, layers)
    own = getattr(model, "preprocessor", None)
    batches = Batches(
        data, batch_size, seed, own if preprocessor is None else preprocessor,
        exclude, force=preprocessor is not None, hint=preprocessor_hint(model),
    )  # fmt: skip
    with strategy_scope(model):
        return _run(model, layers, batches, settings, clock)


def _run(model, layers, batches, settings, clock):
    """Runs `uptrain` after its arguments were checked."""
    layers = in_order(model, layers, batches(0))
    asked = [x for x in settings["stages"] if x != "calibrate"]
    beforehand = None
    if "lora" in (settings["trainable"][x] for x in asked):
        # Adapters cannot be removed again, so data and checkpoints are checked before
        # adapters are added.
        beforehand = Training(model, layers, {}, batches, settings, clock)
        beforehand.prepare()
    selected = chosen(
        model, layers, settings["trainable"], settings["lora_rank"], asked,
        settings["optimizer"],
    )  # fmt: skip
    training = Training(model, layers, selected, batches, settings, clock)
    if beforehand is not None:
        # Fresh adapters do not change outputs, so the measurements still hold.
        training.take(beforehand)
    try:
        return training.run()
    finally:
        # `restore_attention` cannot undo these changes, even if training broke off.
        changed = training.teacher.changed()
        for layer in linear_layers(model):
            layer.trained = tuple(dict.fromkeys((*layer.trained, *changed)))


def _callbacks(given):
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    found = _listed([] if given is None else given)
    others = [x for x in found if not isinstance(x, keras.callbacks.Callback)]
    if others:
        raise ValueError(
            f"`callbacks` must be Keras callbacks. Received: callbacks={others!r:.80}."
        )
    kinds = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore
    savers = [type(x).__name__ for x in found if isinstance(x, kinds)]
    if savers:
        raise ValueError(
            "`callbacks` must not save what `fit` trains, which here is a stage, not "
            f"the model. Received: {savers}. Pass `checkpoint_dir=` to go on after an "
            "interruption, and save the model when `uptrain` is done."
        )
    return found


def _warn_of_another_teacher(model, layers):
    changed = sorted({path for layer in layers for path in layer.trained})
    if changed:
        warnings.warn(
            f"{len(changed)} weights of {title(model)}'s own, such as {changed[0]!r}, "
            "were trained since it was a softmax model. The teacher is softmax "
            "attention with these weights as they are now, not the checkpoint's. To "
            "be taught by the checkpoint, run all stages in one call, or restore it "
            "from its files.",
            stacklevel=3,
        )


def _listed(given):
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _check(model, layers, settings):
    """Raises `ValueError` if an argument is invalid."""
    if not layers:
        raise ValueError(
            f"`model` has no linear attention to train. Received: {title(model)}. "
            "Call `keras_rfattn.replace_attention(model, 'hedgehog')` first."
        )
    folder, stages = settings["checkpoint_dir"], settings["stages"]
    if not isinstance(folder, (str, os.PathLike, type(None))):
        raise ValueError(
            f"`checkpoint_dir` must be a path. Received: checkpoint_dir={folder!r:.80}."
        )
    known = [x for x in STAGES if x in stages]
    if not stages or stages != known:
        raise ValueError(
            f"`stages` must be some of {STAGES}, once each and in that order. "
            f"Received: stages={stages!r}."
        )
    for name, options in (
        ("order", ORDERS), ("objective", OBJECTIVES), ("verbose", VERBOSITIES),
        ("jit_compile", COMPILING),
    ):  # fmt: skip
        if settings[name] not in options:
            raise ValueError(
                f"`{name}` must be one of {options}. "
                f"Received: {name}={settings[name]!r}."
            )
    for name in INTEGERS:
        value = settings[name]
        is_integer = isinstance(value, (int, np.integer))
        if not is_integer or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"`{name}` must be a positive integer. Received: {name}={value!r}."
            )
    share = settings["window_dropout"]
    is_number = isinstance(share, (int, float, np.number))
    if not is_number or isinstance(share, bool) or not 0 <= share < 1:
        raise ValueError(
            f"`window_dropout` must be in [0, 1). Received: window_dropout={share!r}."
        )
