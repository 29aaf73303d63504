"""The stages of an uptraining, one after the other, from wherever it was left."""

import time

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import run
from keras_rfattn.uptraining.attention import QUANTITIES
from keras_rfattn.uptraining.attention import AttentionStage
from keras_rfattn.uptraining.attention import relative
from keras_rfattn.uptraining.calibrate import calibrate
from keras_rfattn.uptraining.callbacks import NotFinite
from keras_rfattn.uptraining.data import HEAD
from keras_rfattn.uptraining.features import FeaturesStage
from keras_rfattn.uptraining.fitting import fit_stage
from keras_rfattn.uptraining.fitting import optimizer_for
from keras_rfattn.uptraining.fitting import rate_for
from keras_rfattn.uptraining.interrupts import Interrupts
from keras_rfattn.uptraining.plan import planned
from keras_rfattn.uptraining.report import LayerResult
from keras_rfattn.uptraining.report import StageResult
from keras_rfattn.uptraining.report import UptrainingReport
from keras_rfattn.uptraining.report import peak_memory
from keras_rfattn.uptraining.resume import Checkpoints
from keras_rfattn.uptraining.resume import as_plain
from keras_rfattn.uptraining.resume import assign
from keras_rfattn.uptraining.resume import mechanism
from keras_rfattn.uptraining.resume import state_of
from keras_rfattn.uptraining.selection import fresh_adapters
from keras_rfattn.uptraining.selection import once
from keras_rfattn.uptraining.selection import only_training
from keras_rfattn.uptraining.teacher import Teacher
from keras_rfattn.uptraining.teacher import checksum


class Training:
    """One call of `uptrain`, its arguments checked.

    Args:
        model: A model with linear attention.
        layers: Its linear attention layers.
        selected: Variables by the name of the stage that trains them.
        batches: `Batches`.
        settings: Further arguments of `uptrain`, by name.
    """

    def __init__(self, model, layers, selected, batches, settings):
        self.model, self.layers, self.batches = model, layers, batches
        self.selected, self.settings = selected, settings
        self.trained = once(v for x in selected.values() for v in x)
        self.of_maps = [v for layer in layers for v in layer.feature_map.variables]
        # What a checkpoint has to bring back; the rest is the teacher's alone.
        self.state = once([*self.trained, *self.of_maps])
        moving = {id(v) for v in self.state}
        self.frozen = [v for v in model.weights if id(v) not in moving]
        self.teacher = Teacher(model, layers, self.trained)
        self.whole = AttentionStage(
            self.teacher, layers, window_dropout=settings["window_dropout"]
        )
        self.checkpoints = Checkpoints(settings["checkpoint_dir"], self.identity())
        # What is known of the past, for the report and for checkpoints.
        self.results, self.before, self.control = [], None, None

    def identity(self):
        """What a checkpoint must have in common with this training."""
        others = {id(v) for v in self.of_maps}
        shapes = [list(v.shape) for v in self.trained]
        if "lora" in self.settings["trainable"].values():
            # Fresh adapters are random, and the softmax model is none the wiser; nor
            # are they there when checkpoints are looked at first.
            others |= {id(v) for v in fresh_adapters(self.model)}
            shapes = self.settings["lora_rank"]
        own = [v for v in self.model.weights if id(v) not in others]
        names = "stages", "steps", "trainable", "order", "objective", "window_dropout"
        optimizer = self.settings["optimizer"]
        return {
            "backend": keras.backend.backend(),
            "softmax weights": checksum(v.value for v in own),
            "first batch": checksum(keras.tree.flatten(self.batches(0))),
            "trained": shapes,
            "mechanisms": [mechanism(layer) for layer in self.layers],
            "optimizer": optimizer and as_plain(optimizer),
            "seed": self.batches.seed,
            "batch_size": self.batches.batch_size,
            **{name: self.settings[name] for name in names},
        }

    def run(self):
        """Runs what is left of the plan.

        Returns:
            An `UptrainingReport`.

        Raises:
            ValueError: See `uptrain`.
        """
        at_first, frozen = state_of(self.state), checksum(v.value for v in self.frozen)
        try:
            self.before, self.control = self.measured()
            if "features" in self.selected:
                # Now: a model without outputs to compare, and the control before
                # anything trains.
                self.whole_model = self.features_trainer()
            index, done, kept = self.resumed()
        except Exception:
            assign(self.state, at_first)
            raise
        ids = {id(v) for v in self.selected.get("attention", ())}

        def trains(layer):
            return any(id(v) in ids for v in layer.variables)

        plan = list(planned(self.settings, self.layers, trains))
        for i, stage in enumerate(plan):
            if i < index:
                continue
            start, errors, zero = time.perf_counter(), [], None
            if stage.name == "calibrate":
                calibrate(self.model, list(self.batches.first(HEAD)), verbose=0)
            elif stage.steps:
                first = sum(x.steps for x in plan[:i])
                left = (done, kept) if i == index else ()
                errors, zero = self.train(stage, i, first, *left)
            name = stage.name if stage.layer is None else f"{stage.name} {stage.layer}"
            seconds = time.perf_counter() - start
            self.results.append(StageResult.of(name, errors, seconds, zero))
            if checksum(v.value for v in self.frozen) != frozen:
                raise ValueError(
                    f"Weights of the teacher changed during stage {name!r}, which does "
                    "not train them. Received: other values than at its start. Remove "
                    "the callback, or whatever else, that changes them."
                )
            # A callback may have ended the stage early: it is over all the same.
            self.save(i + 1, 0, [])
        return self.report()

    def resumed(self):
        """`(stage, steps done, arrays and errors)` to go on from."""
        found = self.checkpoints.load()
        if found is None:
            return 0, 0, None
        (index, done), arrays, notes = found
        assign(self.state, [arrays[f"state{i}"] for i in range(len(self.state))])
        self.before, self.control = map(np.array, (notes["before"], notes["control"]))
        self.results = [StageResult(*row) for row in notes["results"]]
        return index, done, (arrays, notes["errors"])

    def save(self, index, done, errors, optimizer=None):
        """A checkpoint after `done` steps of a stage."""
        arrays = {f"state{i}": x for i, x in enumerate(state_of(self.state))}
        if optimizer is not None:
            slots = state_of(optimizer.variables)
            arrays |= {f"optimizer{i}": x for i, x in enumerate(slots)}
        notes = {
            "before": self.before.tolist(),
            "control": self.control.tolist(),
            "results": [list(vars(x).values()) for x in self.results],
            "errors": errors,
        }
        self.checkpoints.save((index, done), arrays, notes)

    def train(self, stage, index, first, done=0, kept=None):
        """Runs a training stage; its errors by step, and that of no attention.

        Args:
            stage: `Planned`.
            index: Which it is in the plan.
            first: Steps of the plan before it.
            done: Steps of it that a checkpoint has seen.
            kept: Its arrays and errors.
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
        """That of stage "features", with the error of no attention."""
        trainer = FeaturesStage(
            self.teacher, self.settings["objective"], self.settings["window_dropout"]
        )
        trainer.control = trainer.without_attention(self.batches(0))
        return trainer

    def trainer(self, stage):
        """The Keras model that trains in a stage."""
        settings = self.settings
        if stage.name == "features":
            return self.whole_model
        if stage.layer is None:
            return self.whole
        i = stage.layer
        return AttentionStage(
            self.teacher, self.layers[i : i + 1], self.layers[:i],
            settings["window_dropout"],
        )  # fmt: skip

    def measured(self):
        """Errors of heads on the first batches, `(L, N)`, and those of the mean of V.

        NaN for heads that a layer has less than others.
        """
        total = {name: 0 for name in QUANTITIES}
        for step, _ in enumerate(self.batches.first(HEAD)):
            inputs = self.batches.with_noise(step, len(self.layers) + 1)
            inputs["noise"][:] = 1  # leaves no window out
            with Interrupts().held():
                found = run(self.model, inputs, self.whole.predict_on_batch)
            bad = ~np.all(np.isfinite(found["squared"]), axis=(0, 2))
            if self.before is None and np.any(bad):
                paths = [self.layers[i].path for i in np.flatnonzero(bad)]
                raise ValueError(
                    "`data` and weights must be finite, and so must what attention "
                    f"puts out. Received: outputs that are not finite, of {paths[:3]} "
                    f"in batch {step}. Look for NaN, or for tokens beyond the "
                    "vocabulary."
                )
            total = {k: x + found[k].sum(0, keepdims=True) for k, x in total.items()}
        found = (keras.ops.convert_to_numpy(x) for x in relative(total))
        error, _, control, heads = found
        blind = ~np.any(total["rows"] > 0, axis=(0, 2))
        if np.any(blind):
            paths = [self.layers[i].path for i in np.flatnonzero(blind)]
            raise ValueError(
                "`data` must hold a real token for every linear layer. Received: "
                "padding alone, or a model that does not call all of them, at "
                f"{paths[:3]}."
            )
        return tuple(np.where(heads > 0, x, np.nan) for x in (error, control))

    def report(self):
        """The `UptrainingReport`."""
        after, _ = self.measured()
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
            layers=layers,
            trained=tuple(v.path for v in self.trained if id(v) not in of_maps),
            parameters=int(sum(np.prod(v.shape) for v in self.trained)),
            dropped=self.batches.dropped,
            seed=self.batches.seed,
            peak_memory=peak_memory(),
        )


def _place(name):
    """The number at the end of an array's name."""
    return int(name.removeprefix("optimizer"))
