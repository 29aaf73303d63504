"""Runs the stages of uptraining in order, from the start or from a checkpoint."""

import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.trained import checksum
from keras_rfattn.layers.checks import title
from keras_rfattn.uptraining.attention import AttentionStage
from keras_rfattn.uptraining.callbacks import NotFinite
from keras_rfattn.uptraining.clock import AFTER, BEFORE, OVERHEAD, PREPARING, SAVING
from keras_rfattn.uptraining.data import HEAD
from keras_rfattn.uptraining.features import FeaturesStage
from keras_rfattn.uptraining.fitting import fit_stage, optimizer_for, rate_for
from keras_rfattn.uptraining.identity import identity
from keras_rfattn.uptraining.measuring import Measuring
from keras_rfattn.uptraining.plan import planned_rounds
from keras_rfattn.uptraining.recalibrate import calibrate_stage
from keras_rfattn.uptraining.report import (
    LayerResult,
    StageResult,
    UptrainingReport,
    peak_memory,
)
from keras_rfattn.uptraining.resume import Checkpoints, assign, extended, state_of
from keras_rfattn.uptraining.selection import once, only_training
from keras_rfattn.uptraining.teacher import Teacher


class Training:
    """Carries out one call of `uptrain` whose arguments were checked.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        selected: Dict from names of stages to lists of the variables they train.
        batches: The data, as `Batches`.
        settings: Dict of further arguments of `uptrain`.
        clock: The `Clock` that was started with the call.
    """

    def __init__(self, model, layers, selected, batches, settings, clock):
        self.model, self.layers, self.batches = model, layers, batches
        self.selected, self.settings, self.clock = selected, settings, clock
        self.trained = once(v for x in selected.values() for v in x)
        self.of_maps = [v for layer in layers for v in layer.feature_map.variables]
        # Checkpoints store these; all other weights are the teacher's and never change.
        self.state = once([*self.trained, *self.of_maps])
        moving = {id(v) for v in self.state}
        self.frozen = [v for v in model.weights if id(v) not in moving]
        self.teacher = Teacher(model, layers, self.trained)
        self.measuring = Measuring(self.teacher, layers, batches, settings["verbose"])
        folder = settings["checkpoint_dir"]
        self.checkpoints = Checkpoints(folder, {} if folder is None else identity(self))
        # Results so far, for the report and for checkpoints: results of stages, errors
        # before training, and errors of uniform attention.
        self.results, self.before, self.control = [], None, None
        # Steps of the first call, then those of each extension of the run.
        self.rounds = [settings["steps"]]
        # The trainer of stage "features", and its error without attention.
        self.whole_model, self.no_attention = None, None

    def run(self):
        """Runs the stages that are not done yet.

        Returns:
            An `UptrainingReport`.

        Raises:
            ValueError: See `uptrain`.
        """
        at_first, frozen = state_of(self.state), checksum(v.value for v in self.frozen)
        try:
            found = self.prepare()
            index, done, kept = self.resumed(found)
        except Exception:
            assign(self.state, at_first)
            raise
        ids = {id(v) for v in self.selected.get("attention", ())}

        def trains(layer):
            return any(id(v) in ids for v in layer.variables)

        plan = planned_rounds(self.rounds, self.settings, self.layers, trains)
        for i, stage in enumerate(plan):
            if i < index:
                continue
            errors, zero, note = [], None, ""
            if stage.name == "calibrate":
                note = self.calibrate()
            elif stage.steps:
                first = sum(x.steps for x in plan[:i])
                left = (done, kept) if i == index else ()
                errors, zero = self.train(stage, i, first, *left)
            name = stage.name if stage.layer is None else f"{stage.name} {stage.layer}"
            if checksum(v.value for v in self.frozen) != frozen:
                raise ValueError(
                    f"Weights of the teacher changed during stage {name!r}, which does "
                    "not train them. Received: other values than at its start. Remove "
                    "the callback or other code that changes them."
                )
            seconds = self.clock.lap(_lap(i))
            self.results.append(StageResult.of(name, errors, seconds, zero, note))
            # A stage that a callback stopped early counts as done too.
            self.save(i + 1, 0, [])
            self.clock.lap(SAVING)
        return self.report()

    def prepare(self):
        """Finds the newest checkpoint, and measures the errors before training.

        Returns:
            `(position, arrays, notes)` of the checkpoint, or `None` if there is none.

        Raises:
            ValueError: If the checkpoint belongs to another training or has more steps,
                or if the data or the outputs of the model cannot be trained on.
        """
        found = self.checkpoints.load()
        if found is not None:
            notes = found[-1]
            self.rounds = extended(notes["rounds"], self.settings["steps"])
            self.before, self.control = (
                np.array(notes[name]) for name in ("before", "control")
            )
        self.clock.lap(PREPARING)
        if self.before is None:
            self.before, self.control = self.measuring(
                "before training", must_be_finite=True
            )
        if "features" in self.settings["stages"]:
            # This raises early for a model without outputs to compare.
            self.whole_model = self.features_trainer()
        self.clock.lap(BEFORE)
        return found

    def take(self, other):
        """Copies the measurements of another `Training` of the same model."""
        self.before, self.control = other.before, other.control
        self.no_attention = other.no_attention

    def calibrate(self):
        """Runs stage "calibrate", and returns text that says what it left unchanged."""
        verbose = self.settings["verbose"]
        note = calibrate_stage(
            self.model, self.layers, list(self.batches.first(HEAD)), self.before,
            lambda: self.measuring("after another calibration")[0],
        )  # fmt: skip
        if note and verbose:
            print(f"Stage 'calibrate': {note}")
        return note

    def resumed(self, found):
        """Restores a checkpoint, and returns where the run resumes.

        Args:
            found: `(position, arrays, notes)` of the checkpoint, or `None`.

        Returns:
            `(stage, steps done, (arrays, errors))`: the index of the stage in the plan,
            the steps of it that are done, and its saved arrays and errors by step. The
            last is `None` without a checkpoint.
        """
        if found is None:
            return 0, 0, None
        (index, done), arrays, notes = found
        assign(self.state, [arrays[f"state{i}"] for i in range(len(self.state))])
        self.results = [StageResult(*row) for row in notes["results"]]
        self.clock.add(notes["seconds"])
        return index, done, (arrays, notes["errors"])

    def save(self, index, done, errors, optimizer=None):
        """Saves a checkpoint after `done` steps of stage number `index` of the plan."""
        arrays = {f"state{i}": x for i, x in enumerate(state_of(self.state))}
        if optimizer is not None:
            slots = state_of(optimizer.variables)
            arrays |= {f"optimizer{i}": x for i, x in enumerate(slots)}
        notes = {
            "before": self.before.tolist(),
            "control": self.control.tolist(),
            "results": [list(vars(x).values()) for x in self.results],
            "errors": errors,
            "rounds": self.rounds,
            "seconds": self.clock.seconds,
        }
        self.checkpoints.save((index, done), arrays, notes)

    def train(self, stage, index, first, done=0, kept=None):
        """Runs a training stage.

        Args:
            stage: The `Planned` stage.
            index: Index of the stage in the plan.
            first: Number of steps in the plan before this stage.
            done: Number of steps of the stage that a checkpoint contains.
            kept: `(arrays, errors)` of that checkpoint, or `None`.

        Returns:
            `(errors, zero)`: the errors by step, and the error without attention.
        """
        variables = self.selected[stage.name]
        if stage.layer is not None:
            own = {id(v) for v in self.layers[stage.layer].variables}
            variables = [v for v in variables if id(v) in own]
        trainer = self.trainer(stage)
        rate = rate_for(
            stage.name, self.settings["trainable"][stage.name],
            getattr(trainer, "objective", None), self.layers,
        )  # fmt: skip
        optimizer = optimizer_for(
            rate, stage.steps, self.settings["optimizer"],
            any(x.compute_dtype == "float16" for x in self.layers),
        )  # fmt: skip
        resumed = None
        if done:
            arrays, errors = kept
            names = sorted((x for x in arrays if x.startswith("optimizer")), key=_place)
            resumed = done, [arrays[x] for x in names], errors
        zero = float(getattr(trainer, "control", 1.0))
        if self.settings["verbose"]:
            print(f"Stage '{stage.name}': {stage.steps - done} steps, zero attention "
                  f"has an error of {zero:.3f}")  # fmt: skip

        def inputs(start):
            for step in range(first + start, first + stage.steps):
                yield (self.batches.with_noise(step, len(self.layers) + 1),)

        def save(*what):
            self.clock.lap(_lap(index))
            self.save(index, *what)

        try:
            with only_training(self.model, variables):
                errors = fit_stage(
                    trainer, trainer.trainable_variables, inputs, stage.steps,
                    optimizer, self.settings, save, resumed,
                )  # fmt: skip
        except NotFinite as error:
            raise ValueError(
                f"The loss of stage '{stage.name}' is not finite at its step "
                f"{error.step} (batch {first + error.step} of the data). The weights "
                f"of step {max(error.step - 1, 0)}, the last good ones, are kept. "
                "Look for NaN in that batch, or use a smaller learning rate."
            ) from None
        return errors, zero

    def features_trainer(self):
        """Returns the trainer of stage "features", with its error without attention."""
        trainer = FeaturesStage(
            self.teacher, self.settings["objective"], self.settings["window_dropout"]
        )
        if self.no_attention is None:
            self.no_attention = trainer.without_attention(self.batches(0))
        trainer.control = self.no_attention
        return trainer

    def trainer(self, stage):
        """Returns the Keras model whose `fit` trains the stage."""
        settings = self.settings
        if stage.name == "features":
            return self.whole_model
        i = stage.layer
        learning, below = self.layers, ()
        if i is not None:
            learning, below = self.layers[i : i + 1], self.layers[:i]
        return AttentionStage(self.teacher, learning, below, settings["window_dropout"])

    def report(self):
        """Measures the errors after training, and returns the `UptrainingReport`."""
        after, _ = self.measuring("after training")
        self.clock.lap(AFTER)
        errors = zip(self.before, after, self.control, strict=True)
        layers = tuple(
            LayerResult(layer.path, *(tuple(x[~np.isnan(x)].tolist()) for x in rows))
            for layer, rows in zip(self.layers, errors, strict=True)
        )
        names = {feature_maps.name_of(x.feature_map) for x in self.layers}
        of_maps = {id(v) for v in self.of_maps}
        return UptrainingReport(
            model=title(self.model),
            mechanism=", ".join(sorted(names)),
            stages=tuple(self.results),
            overhead=tuple(
                (name, self.clock.seconds.get(name, 0.0)) for name in OVERHEAD
            ),
            layers=layers,
            trained=tuple(v.path for v in self.trained if id(v) not in of_maps),
            parameters=int(sum(np.prod(v.shape) for v in self.trained)),
            dropped=self.batches.dropped,
            seed=self.batches.seed,
            peak_memory=peak_memory(),
        )


def _lap(index):
    """Returns the name under which the clock counts a stage of the plan."""
    return f"stage {index}"


def _place(name):
    """Returns the number at the end of the name of an optimizer's array."""
    return int(name.removeprefix("optimizer"))
