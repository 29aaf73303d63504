"""Runs the stages of uptraining in order, from the start or from a checkpoint."""

from typing import NamedTuple

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.backend.devices import peak_memory
from keras_rfattn.feature_maps.weights import checksum
from keras_rfattn.layers.checks import title
from keras_rfattn.uptraining.attention import AttentionStage, Measuring
from keras_rfattn.uptraining.batches import HEAD
from keras_rfattn.uptraining.calibrate import calibrate_stage
from keras_rfattn.uptraining.features import FeaturesStage
from keras_rfattn.uptraining.fitting import fit_stage, optimizer_for, rate_for
from keras_rfattn.uptraining.report import (
    AFTER,
    BEFORE,
    OVERHEAD,
    PREPARING,
    SAVING,
    LayerResult,
    StageResult,
    UptrainingReport,
    headline,
)
from keras_rfattn.uptraining.resume import identity
from keras_rfattn.uptraining.stages import Stage
from keras_rfattn.uptraining.weights import (
    Teacher,
    assign,
    once,
    only_training,
    values_of,
)

# How a stage starts: no steps done, no values of its optimizer, no errors of steps.
ANEW = 0, (), ()


class PlannedStage(NamedTuple):
    """A stage with its place among the steps of a run."""

    stage: Stage
    steps: int  # 0 for "calibrate"
    first: int  # number of steps of the stages before


def planned(settings, layers):
    """Returns the list of `PlannedStage`s of a run."""
    plan, first = [], 0
    adapts = any(layer.feature_map.is_adaptive for layer in layers)
    if not settings.stages[0].trains and adapts:
        plan.append(PlannedStage(settings.stages[0], 0, first))
    count = len(settings.training_stages)
    for i, stage in enumerate(settings.training_stages):
        # Earlier stages get the steps that remain after the division.
        steps = settings.steps // count + (i < settings.steps % count)
        plan.append(PlannedStage(stage, steps, first))
        first += steps
    return plan


class Training:
    """Carries out one call of `uptrain` whose arguments were checked.

    `selected` is a dict from the name of a stage to the variables that it trains.
    """

    def __init__(self, model, layers, selected, batches, settings, clock):
        self.model, self.layers, self.batches = model, layers, batches
        self.selected, self.settings, self.clock = selected, settings, clock
        self.trained = once(v for stage in selected.values() for v in stage)
        of_maps = [v for layer in layers for v in layer.feature_map.variables]
        # Checkpoints hold these; all other weights are the teacher's and never change.
        self.state = once([*self.trained, *of_maps])
        changing = {id(v) for v in self.state}
        self.frozen = [v for v in model.weights if id(v) not in changing]
        self.teacher = Teacher(model, layers, self.trained)
        self.stages = {stage.name: stage for stage in settings.stages}
        rows = self.stages.get("attention", Stage("attention")).max_rows
        self.measuring = Measuring(self.teacher, batches, rows)
        self.identity = None
        if settings.checkpoint is not None:
            self.identity = identity(model, layers, self.trained, batches, settings)
        # Results so far, for the report and for checkpoints: results of stages, errors
        # before training, and errors of uniform attention.
        self.results, self.before, self.control = [], None, None
        # The trainer of stage "features", and its error without attention.
        self.whole_model, self.no_attention = None, None

    def run(self):
        """Runs the stages that are not done yet."""
        if self.settings.verbose:
            print(headline(*self._heading()))
        values = values_of(self.state)
        frozen = checksum(v.value for v in self.frozen)
        try:
            checkpoint = self.prepare()
            index, resumed = self.restore(checkpoint)
        except Exception:
            assign(self.state, values)
            raise
        plan = planned(self.settings, self.layers)
        for i, planned_stage in enumerate(plan[index:], index):
            result = self.run_stage(planned_stage, i, resumed)
            resumed, name = ANEW, planned_stage.stage.name
            if checksum(v.value for v in self.frozen) != frozen:
                raise ValueError(
                    f"Weights of the teacher changed during stage {name!r}, "
                    "which does not train them. Received: other values than at its "
                    "start. Remove the callback, or other code, that changes them."
                )
            seconds = self.clock.lap(name)
            self.results.append(StageResult.of(name, seconds, **result))
            # A stage that a callback stopped early counts as done too.
            self.save(i + 1, 0, [])
            self.clock.lap(SAVING)
        return self.report()

    def prepare(self):
        """Loads the checkpoint, if any, and measures the errors before training."""
        checkpoint = None
        if self.identity is not None:
            checkpoint = self.settings.checkpoint.load(self.identity)
        if checkpoint is not None:
            _, _, notes = checkpoint
            self.before = np.array(notes["before"])
            self.control = np.array(notes["control"])
        self.clock.lap(PREPARING)
        if self.before is None:
            self.before, self.control = self.measuring(must_be_finite=True)
        if "features" in self.stages:
            # This raises early for a model without outputs to compare.
            stage = self.stages["features"]
            self.whole_model = FeaturesStage(
                self.teacher, stage.objective, stage.window_dropout
            )
            if self.no_attention is None:
                first_batch = self.batches(0)
                self.no_attention = self.whole_model.without_attention(first_batch)
            self.whole_model.no_attention = self.no_attention
        self.clock.lap(BEFORE)
        return checkpoint

    def take(self, other):
        """Copies the measurements of another `Training` of the same model."""
        self.before, self.control = other.before, other.control
        self.no_attention = other.no_attention

    def restore(self, checkpoint):
        """Restores a checkpoint, and returns where the run resumes."""
        if checkpoint is None:
            return 0, ANEW
        (index, done), arrays, notes = checkpoint
        assign(self.state, [arrays[f"state{i}"] for i in range(len(self.state))])
        self.results = [StageResult(*row) for row in notes["results"]]
        self.clock.add(notes["seconds"])
        # A file keeps the order of its arrays, which is that of the variables.
        values = [x for name, x in arrays.items() if name.startswith("optimizer")]
        return index, (done, values, notes["errors"])

    def save(self, index, done, errors, optimizer=None):
        """Saves a checkpoint after `done` steps of stage number `index` of the plan."""
        if self.identity is None:
            return
        arrays = {f"state{i}": x for i, x in enumerate(values_of(self.state))}
        if optimizer is not None:
            values = values_of(optimizer.variables)
            arrays |= {f"optimizer{i}": x for i, x in enumerate(values)}
        notes = {
            "before": self.before.tolist(),
            "control": self.control.tolist(),
            "results": [list(vars(result).values()) for result in self.results],
            "errors": errors,
            "seconds": self.clock.seconds,
        }
        self.settings.checkpoint.save(self.identity, (index, done), arrays, notes)

    def run_stage(self, planned_stage, index, resumed):
        """Runs a stage."""
        if not planned_stage.stage.trains:
            note = calibrate_stage(
                self.model,
                self.layers,
                list(self.batches.first(HEAD)),
                self.before,
                lambda: self.measuring()[0],
            )
            if note and self.settings.verbose:
                print(f"Stage 'calibrate': {note}")
            return {"note": note}
        if not planned_stage.steps:
            return {}
        return self.train(planned_stage, index, resumed)

    def train(self, planned_stage, index, resumed):
        """Trains a stage, and returns what `run_stage` returns."""
        (stage, steps, first), settings = planned_stage, self.settings
        trainer = self.whole_model
        if stage.name == "attention":
            trainer = AttentionStage(self.teacher, stage.window_dropout, stage.max_rows)
        objective = getattr(trainer, "objective", None)
        rate = rate_for(stage, objective, self.layers)
        is_float16 = any(layer.compute_dtype == "float16" for layer in self.layers)
        optimizer = optimizer_for(rate, steps, settings.optimizer, is_float16)
        done, _, _ = resumed
        if settings.verbose:
            controls = f"no attention {trainer.no_attention:.3f}"
            if stage.name == "attention":
                uniform = np.nanmean(self.control)
                controls += f", uniform attention {uniform:.3f}"
            count = f"{steps - done} steps"
            print(f"Stage '{stage.name}', {count}: {trainer.measure} ({controls})")

        def save(*progress):
            self.clock.lap(stage.name)
            self.save(index, *progress)

        batches = (
            (self.batches.with_noise(step, len(self.layers) + 1),)
            for step in range(first + done, first + steps)
        )
        with only_training(self.model, self.selected[stage.name]):
            errors = fit_stage(
                trainer, batches, planned_stage, optimizer, settings, save, resumed
            )
        return {
            "errors": errors,
            "no_attention": trainer.no_attention,
            "measure": trainer.measure,
        }

    def report(self):
        """Measures the errors after training, and returns the `UptrainingReport`."""
        after, _ = self.measuring()
        self.clock.lap(AFTER)
        rows = zip(self.layers, self.before, after, self.control, strict=True)
        return UptrainingReport(
            *self._heading(),
            stages=tuple(self.results),
            overhead=tuple((name, self.clock.seconds[name]) for name in OVERHEAD),
            layers=tuple(
                LayerResult(layer.path, *map(_measured, errors))
                for layer, *errors in rows
            ),
            trained=tuple(v.path for v in self.trained if id(v) in self.teacher.copies),
            parameters=int(sum(np.prod(v.shape) for v in self.trained)),
            seed=self.batches.seed,
            peak_memory=peak_memory(),
        )

    def _heading(self):
        """Returns the title of the model, and names and widths of its maps, as text."""
        maps = [layer.feature_map for layer in self.layers]
        names = {feature_maps.name_of(x) for x in maps}
        widths = {x.output_dim for x in maps if not x.is_exact}
        texts = ", ".join(sorted(names)), ", ".join(map(str, sorted(widths)))
        return title(self.model), *texts


def _measured(errors):
    """Returns the errors of a layer's heads that were measured, as a tuple."""
    return tuple(errors[~np.isnan(errors)].tolist())
