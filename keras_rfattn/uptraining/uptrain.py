"""Trains a converted linear model to match its softmax checkpoint: `uptrain`."""

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_choice, check_seed, check_sizes, is_number
from keras_rfattn.backend.devices import dataset_of
from keras_rfattn.feature_maps.weights import assign
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.models.swap import strategy_scope
from keras_rfattn.uptraining.attention import AttentionStage, measured_errors
from keras_rfattn.uptraining.batches import Batches
from keras_rfattn.uptraining.calibrate import calibrate_stage
from keras_rfattn.uptraining.features import OBJECTIVES, FeaturesStage
from keras_rfattn.uptraining.progress import (
    Progress,
    checked_callbacks,
    identity,
    path_of,
)
from keras_rfattn.uptraining.report import LayerResult, StageResult, UptrainingReport
from keras_rfattn.uptraining.weights import Teacher, only_training, variables_to_train

# Names of the stages, in the order in which they run, and the options of each.
OPTIONS = {
    "calibrate": (),
    "attention": ("trainable", "window_dropout", "max_rows"),
    "features": ("trainable", "window_dropout", "objective"),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of `keras_rfattn.uptrain`, with its options.

    Args:
        name: `"calibrate"` fits maps to the first batches, without gradients and
            options; it keeps maps that were trained or calibrated. `"attention"` trains
            every layer against the softmax attention of the same layer, on the inputs
            that the layer has in the softmax model; the loss is the relative squared
            error of outputs plus the divergence of attention rows. `"features"` trains
            the linear model end to end against the softmax model.
        trainable: What trains: `"maps"` (weights of feature maps only), `"query_key"`
            (maps, and trainable weights of the query and key projections: after
            `enable_lora` their adapters) or `"all"` (maps and all other trainable
            weights of the model; stage `"features"` only).
        objective: What stage `"features"` compares: `"features"` (last hidden states,
            of the backbone if the model is a task), `"logits"`, or `"auto"`: logits
            for language models, hidden states for other models. `"next_token"` trains a
            `CausalLM` to predict the tokens that follow in the data (cross-entropy, 0.9
            of the loss), and to match softmax's 256 largest logits (divergence, 0.1).
            The report still has the divergence of all logits, which may rise.
        window_dropout: Share of sequences (stage `"attention"`) or batches (stage
            `"features"`) for which a layer leaves its window out, so that its
            features learn too.
        max_rows: Largest number of query rows of a sequence, evenly spread, that stage
            `"attention"` compares; its time and memory are proportional to it. 128
            halves the time of a step for a decoder at 1024 tokens.

    Examples:
        >>> from keras_rfattn.uptraining import Stage
        >>> stages = ["attention", Stage("features", trainable="query_key")]
    """

    name: str
    trainable: str = "maps"
    objective: str = "auto"
    window_dropout: float = 0.25
    max_rows: int = 512

    def __post_init__(self):
        check_choice("name", self.name, tuple(OPTIONS))
        check_choice("trainable", self.trainable, ("maps", "query_key", "all"))
        check_choice("objective", self.objective, ("auto", *OBJECTIVES))
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in OPTIONS[self.name] and value != field.default:
                raise ValueError(
                    f"Options of stage {self.name!r} must be some of "
                    f"{OPTIONS[self.name]}. Received: {field.name}={value!r}."
                )
        if (self.name, self.trainable) == ("attention", "all"):
            raise ValueError(
                "`trainable` must be 'maps' or 'query_key' in stage 'attention', which "
                "compares layers. Received: trainable='all'."
            )
        if not is_number(self.window_dropout) or not 0 <= self.window_dropout < 1:
            raise ValueError(
                "`window_dropout` must be in [0, 1). "
                f"Received: window_dropout={self.window_dropout!r}."
            )
        check_sizes(max_rows=self.max_rows)


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
    copies. Dropout is inactive. Maps train in a frozen model too, but not if their own
    `trainable` is False while their layer's is True.

    Args:
        model: A model changed by `replace_attention`.
        data: Anything `keras.Model.fit` takes; labels are ignored, and sample weights
            `(B, T)` or `(B,)` weigh stage `"features"`. It can be an array, a dict of
            arrays, `(x, y)`, a `keras.utils.PyDataset`, a `tf.data.Dataset`,
            a `DataLoader` of PyTorch, a generator or a function that makes one, a list
            of batches, or texts or images for the model's own preprocessor.
        steps: Number of training steps in total, divided equally among the stages that
            train.
        stages: The stages to run: some of `"calibrate"`, `"attention"` and
            `"features"`, in this order. Each is a name, or a
            `keras_rfattn.uptraining.Stage` with options, such as which weights train.
        batch_size: Number of rows per batch when `data` is arrays or texts, or yields
            single texts.
        optimizer: A Keras optimizer, its name or its config. Each stage starts with a
            fresh copy. The default is Adam with a cosine schedule that falls to a
            twentieth of the learning rate. That rate is the map's `learning_rate`
            (0.02, `"hedgehog"` 0.06) in stage `"attention"`, and 0.005 in `"features"`
            (0.001 for logits and next tokens). It is 0.001 if weights of the model
            itself train, and 0.0001 if all of them do.
        seed: Non-negative integer. The order of the data and window dropout are pure
            functions of the seed and the step. If `None`, it is drawn at random, or 0
            if the call can be resumed.
        callbacks: Keras callbacks for the stages that train. Each stage is a `fit` of
            its own, of ten epochs, whose numbers go on from stage to stage. A
            `keras.callbacks.BackupAndRestore` resumes an interrupted call exactly: it
            saves each `save_freq` steps (100 for `"epoch"`). A `ModelCheckpoint` is
            refused.
        verbose: 0 for silent, 1 or `"auto"` for a progress bar for each epoch, 2 for a
            line for each epoch, as in `keras.Model.fit`.

    Returns:
        An `UptrainingReport`, which prints as a table.

    Raises:
        ValueError: If an argument is invalid, the model has no linear attention,
            nothing would train, the data does not fit the model or has no real token,
            or a checkpoint belongs to another run; the model is unchanged then. Also
            if a loss is not finite; the last good weights are kept, as after any error.
    """
    check_model(model)
    layers = linear_layers(model)
    if not layers:
        raise ValueError(
            f"`model` has no linear attention to train. Received: {title(model)}. "
            "Call `keras_rfattn.replace_attention(model, 'hedgehog')` first."
        )
    check_sizes(steps=steps, batch_size=batch_size)
    check_seed(seed)
    check_choice("verbose", verbose, ("auto", 0, 1, 2))
    callbacks, backup = checked_callbacks(callbacks)
    if seed is None:
        seed = random.randrange(10**9) if backup is None else 0
    settings = {
        # Checkpoints and reports store plain Python numbers.
        "steps": int(steps),
        "stages": checked_stages(stages),
        "batch_size": int(batch_size),
        "optimizer": optimizer and keras.optimizers.get(optimizer),
        "seed": int(seed),
    }
    preprocessor = getattr(model, "preprocessor", None)
    batches = Batches(data, settings["batch_size"], settings["seed"], preprocessor)
    with strategy_scope(model):
        layers = in_order(model, layers, batches(0))
        return _run(model, layers, batches, settings, callbacks, backup, verbose)


def checked_stages(given):
    """Returns a tuple of `Stage`s from a stage or a sequence of stages and names."""
    listed = given if isinstance(given, (list, tuple)) else (given,)
    stages = tuple(x if isinstance(x, Stage) else Stage(x) for x in listed)
    names = tuple(stage.name for stage in stages)
    if not names or names != tuple(x for x in OPTIONS if x in names):
        raise ValueError(
            f"`stages` must be some of {tuple(OPTIONS)}, each at most once and in this "
            f"order. Received: stages={given!r}."
        )
    return stages


def planned(stages, steps, layers):
    """Returns a list of `(stage, its first step, the step after its last)`."""
    names = {stage.name for stage in stages}
    middle = steps if "attention" in names else 0
    if {"attention", "features"} <= names:
        middle = math.ceil(steps / 2)
    spans = {"calibrate": (0, 0), "attention": (0, middle), "features": (middle, steps)}
    learns = any(layer.feature_map.is_adaptive for layer in layers)
    return [(x, *spans[x.name]) for x in stages if x.name != "calibrate" or learns]


def _run(model, layers, batches, settings, callbacks, backup, verbose):
    """Runs `uptrain` after its arguments were checked."""
    steps, stages, optimizer = (settings[x] for x in ("steps", "stages", "optimizer"))
    training = {x.name: x for x in stages if x.name != "calibrate"}
    selected = variables_to_train(model, layers, training.values(), optimizer)
    trained = [v for variables in selected.values() for v in variables]
    trained = list({id(v): v for v in trained}.values())
    teacher = Teacher(model, layers, trained)
    stage = training.get("attention", Stage("attention"))
    # A model of its own, which stays compiled. Those that train are compiled anew.
    meter = AttentionStage(teacher, dataclasses.replace(stage, window_dropout=0))
    measure = functools.partial(measured_errors, meter, batches.head)
    progress = Progress(model, layers, trained)
    names = {feature_maps.name_of(layer.feature_map) for layer in layers}
    mechanism = ", ".join(sorted(names))
    if verbose:
        print(f"Uptraining of {title(model)} with {mechanism}")
    try:
        trainers = {}
        if "attention" in training:
            trainers["attention"] = AttentionStage(teacher, training["attention"])
        if "features" in training:
            stage = training["features"]
            trainers["features"] = FeaturesStage(teacher, stage, batches.weighted(0))
        if backup is not None:
            progress.load(backup, identity(model, layers, batches, settings))
        if progress.before is None:
            progress.before, progress.control = measure(must_be_finite=True)
        plan = planned(stages, steps, layers)
        for stage, first, last in plan[len(progress.results) :]:
            progress.begin(stage, first, last - first)
            trainer, note = trainers.get(stage.name), ""
            if first < last:
                with only_training(model, selected[stage.name]):
                    _fit(trainer, batches, optimizer, progress, callbacks, verbose)
            elif trainer is None:
                note = calibrate_stage(model, layers, batches.head)
            progress.end(trainer, note)
        after, _ = measure()
    except BaseException:
        progress.restore()
        raise
    if backup is not None and backup.delete_checkpoint:
        path_of(backup).unlink()
    errors = zip(layers, progress.before, after, progress.control, strict=True)
    return UptrainingReport(
        title(model),
        mechanism,
        stages=tuple(StageResult(**result) for result in progress.results),
        seconds=progress.seconds,
        layers=tuple(LayerResult(layer.path, *map(tuple, x)) for layer, *x in errors),
        trained=tuple(v.path for v in trained if id(v) in teacher.copies),
        parameters=int(sum(np.prod(v.shape) for v in trained)),
        seed=settings["seed"],
    )


def _fit(trainer, batches, optimizer, progress, callbacks, verbose):
    """Trains a stage for its remaining steps."""
    stage, first, steps = progress.stage, progress.first, progress.steps
    done, layers = len(progress.errors), trainer.learning
    rates = {"maps": trainer.learning_rate, "query_key": 0.001, "all": 0.0001}
    optimizer = _optimizer(rates[stage.trainable], steps, optimizer)
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
    # Ten epochs, for callbacks that act by epoch, counted on from stage to stage.
    per_epoch = math.ceil(steps / 10)
    epoch = math.ceil(first / per_epoch) + done // per_epoch
    trainer.fit(
        dataset_of(remaining),
        steps_per_epoch=per_epoch,
        initial_epoch=epoch,
        epochs=epoch + math.ceil((steps - done) / per_epoch),
        shuffle=False,
        # In this order, what other callbacks change is saved too.
        callbacks=[*callbacks, progress],
        verbose=verbose,
    )


def _optimizer(rate, steps, given):
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
