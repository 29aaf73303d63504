"""From a softmax checkpoint to a linear model that is as good: `uptrain`."""

import os
import warnings

import keras
import numpy as np
from keras import ops

from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.layers.batches import preprocessor_hint
from keras_rfattn.layers.checks import check_model
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import in_order
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.strategy import strategy_scope
from keras_rfattn.uptraining.clock import Clock
from keras_rfattn.uptraining.data import Batches
from keras_rfattn.uptraining.features import OBJECTIVES
from keras_rfattn.uptraining.selection import by_stage
from keras_rfattn.uptraining.selection import chosen
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
    """Trains a model with linear attention to be what it was with softmax.

    The softmax checkpoint is the teacher, inside the same model: weights that do not
    train are shared, of the others the first values are kept beside. Three stages, each
    usable alone:

    - `"calibrate"`: `keras_rfattn.calibrate` on the first batches, no gradients. Passed
      over where no map learns that way. Maps that were trained are kept as they are,
      and so are earlier calibrations that another one would make worse; the report
      says so.
    - `"attention"`: every layer against the softmax attention of the very same layer,
      on inputs of the softmax path: relative squared error of outputs, and divergence
      of attention rows (of 512 query rows of a longer sequence).
    - `"features"`: the linear model end to end against the softmax model: last hidden
      states, or logits.

    Dropout is inactive, and stored statistics of maps stay as calibrated. Maps train in
    a frozen model too, and are frozen again afterwards; a map whose own `trainable` is
    False in a layer whose is True does not train.

    Args:
        model: A model changed by `replace_attention`.
        data: What `keras.Model.fit` takes, labels ignored: an array, a dict of arrays,
            `(x, y)`, a `keras.utils.PyDataset`, `tf.data.Dataset`, a generator or a
            function that makes one, a list of batches; or texts or images, for the
            model's own preprocessor.
        steps: Number of training steps, shared out equally among the stages that train.
            More than the run in `checkpoint_dir` has extend that run.
        stages: Names of stages, in the order above.
        trainable: `"maps"` (weights of feature maps alone), `"query_key"` (with the
            query and key projections), `"lora"` (with adapters that Keras'
            `enable_lora` adds to query, key, value and output projections) or `"all"`
            (with whatever is trainable in the model); or a dict of these by stage, such
            as `{"attention": "maps", "features": "all"}`. Stage `"attention"` trains
            maps, queries and keys at most.
        batch_size: Rows of a batch of arrays and texts.
        optimizer: A Keras optimizer, its name or config; each stage begins with a fresh
            copy. Adam by default, its rate falling by a cosine to a twentieth from the
            map's `learning_rate` (0.02, `"hedgehog"` 0.06) in stage `"attention"` and
            0.005 in `"features"` (0.001 where it compares logits), from 0.001 where the
            model's own weights train, and from 0.0001 where all of them do.
        seed: Non-negative integer: of the data's order and of window dropout, which are
            pure functions of it and the step. Drawn if `None`; 0 with a
            `checkpoint_dir`.
        callbacks: Keras callbacks, for the stages that train; none that save what is
            trained (`checkpoint_dir`).
        verbose: As in `keras.Model.fit`: 0, 1, 2 or `"auto"`.
        order: `"together"`, or `"bottom_up"`: stage `"attention"` layer after layer,
            each on what the trained linear layers below it hand on.
        objective: Of stage `"features"`: `"features"` (of a task's backbone),
            `"logits"` or `"auto"`: logits of language models, else features.
        window_dropout: Share of sequences (`"attention"`) and of batches
            (`"features"`) for which a layer leaves its window out, so that features
            learn too.
        lora_rank: Rank of new adapters.
        exclude: Texts not to train on, such as those of an evaluation; matches but for
            case, spaces and punctuation are dropped from `data` and counted.
        preprocessor: Of raw data; the model's own by default. If given, everything
            goes through it.
        checkpoint_dir: Folder for checkpoints. A call that finds one there goes on from
            it and ends with the weights of an unbroken run. If it has more `steps`, the
            run ends as it was planned, and the steps that are left are a round of
            their own: the training stages once more, each with a fresh optimizer whose
            learning rate begins anew, on the batches that come next.
        save_every: Number of steps between checkpoints.
        jit_compile: As in `keras.Model.compile`.

    Returns:
        An `UptrainingReport`, which prints as a table.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no linear attention,
            nothing would train, or data is not what the model takes or has no real
            token, or `checkpoint_dir` holds another training or one of more steps; the
            model is as it was then. Also if a loss is not finite (the last
            good weights are kept), or a weight of the teacher changes meanwhile.
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
    # As plain numbers, which checkpoints and reports hold.
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
    """`uptrain`, its arguments checked."""
    layers = in_order(model, layers, batches(0))
    asked = [x for x in settings["stages"] if x != "calibrate"]
    beforehand = None
    if "lora" in (settings["trainable"][x] for x in asked):
        # Adapters cannot be taken back: data and checkpoints are judged before they are
        # added.
        beforehand = Training(model, layers, {}, batches, settings, clock)
        beforehand.prepare()
    selected = chosen(
        model, layers, settings["trainable"], settings["lora_rank"], asked,
        settings["optimizer"],
    )  # fmt: skip
    training = Training(model, layers, selected, batches, settings, clock)
    if beforehand is not None:
        # Fresh adapters change nothing.
        training.take(beforehand)
    try:
        return training.run()
    finally:
        # What `restore_attention` cannot give back, also of a training that broke off.
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
    """Raises `ValueError` for arguments that make no sense."""
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
