"""The stages of an uptraining, one after the other, from wherever it was left."""

import time
from typing import NamedTuple

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
from keras_rfattn.uptraining.callbacks import Watch
from keras_rfattn.uptraining.features import FeaturesStage
from keras_rfattn.uptraining.report import LayerResult
from keras_rfattn.uptraining.report import StageResult
from keras_rfattn.uptraining.report import UptrainingReport
from keras_rfattn.uptraining.report import peak_memory
from keras_rfattn.uptraining.resume import Checkpoints
from keras_rfattn.uptraining.resume import assign
from keras_rfattn.uptraining.resume import state_of
from keras_rfattn.uptraining.selection import only_training
from keras_rfattn.uptraining.teacher import Teacher
from keras_rfattn.uptraining.teacher import checksum

FEW = 4  # batches that calibrate, and that errors are measured on
# Learning rates of maps by stage, and where a model's own weights train too.
RATES = {"attention": 0.06, "features": 0.02}
OWN_RATE = 0.001


class Planned(NamedTuple):
    """A stage that is to be run: its steps, and which layer if bottom up."""

    name: str
    steps: int
    layer: int | None = None


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
        self.trained = _once(v for x in selected.values() for v in x)
        self.of_maps = [v for layer in layers for v in layer.feature_map.variables]
        # What a checkpoint has to bring back; the rest is the teacher's alone.
        self.state = _once([*self.trained, *self.of_maps])
        moving = {id(v) for v in self.state}
        self.frozen = [v for v in model.variables if id(v) not in moving]
        self.teacher = Teacher(model, layers, self.trained)
        self.whole = AttentionStage(
            self.teacher, layers, window_dropout=settings["window_dropout"]
        )
        self.checkpoints = Checkpoints(settings["checkpoint_dir"], self.identity())
        # What is known of the past, for the report and for checkpoints.
        self.results, self.before, self.control = [], None, None

    def identity(self):
        """What a checkpoint must have in common with this training."""
        maps = {id(v) for v in self.of_maps}
        own = [v for v in self.model.variables if id(v) not in maps]
        names = "stages", "steps", "trainable", "order", "objective", "window_dropout"
        optimizer = self.settings["optimizer"]
        return {
            "backend": keras.backend.backend(),
            "softmax weights": checksum(v.value for v in own),
            "first batch": checksum(keras.tree.flatten(self.batches(0))),
            "trained": [[v.path, list(v.shape)] for v in self.trained],
            "optimizer": repr(optimizer and optimizer.get_config()),
            "seed": self.batches.seed,
            "batch_size": self.batches.batch_size,
            **{name: self.settings[name] for name in names},
        }

    def plan(self):
        """All stages, in order."""
        stages, total = self.settings["stages"], self.settings["steps"]
        training = [x for x in stages if x != "calibrate"]
        shares = _shared(total, len(training))
        for name in stages:
            if name == "calibrate":
                if any(x.feature_map.is_adaptive for x in self.layers):
                    yield Planned(name, 0)
            elif name == "attention" and self.settings["order"] == "bottom_up":
                parts = _shared(next(shares), len(self.layers))
                for i, steps in enumerate(parts):
                    yield Planned(name, steps, i)
            else:
                yield Planned(name, next(shares))

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
            index, done, kept = self.resumed()
        except Exception:
            assign(self.state, at_first)
            raise
        plan = list(self.plan())
        for i, stage in enumerate(plan):
            if i < index:
                continue
            start = time.perf_counter()
            ends = ()
            if stage.name == "calibrate":
                calibrate(self.model, [self.batches(j) for j in range(FEW)], verbose=0)
                self.save(i, 0, [], None)
            elif stage.steps:
                first = sum(x.steps for x in plan[:i])
                ends = self.train(
                    stage, i, first, *((done, kept) if i == index else ())
                )
            name = stage.name if stage.layer is None else f"{stage.name} {stage.layer}"
            seconds = time.perf_counter() - start
            self.results.append(StageResult(name, stage.steps, seconds, *ends))
            if checksum(v.value for v in self.frozen) != frozen:
                raise ValueError(
                    f"Weights of the teacher changed during stage {name!r}, which does "
                    "not train them. Received: other values than at its start. Remove "
                    "the callback, or whatever else, that changes them."
                )
        return self.report()

    def resumed(self):
        """`(stage, steps done, arrays and errors)` to go on from."""
        found = self.checkpoints.load()
        if found is None:
            return 0, 0, None
        (index, done), arrays, notes = found
        assign(self.state, [arrays[f"state{i}"] for i in range(len(self.state))])
        self.before, self.control = (
            np.array(notes["before"]),
            np.array(notes["control"]),
        )
        self.results = [StageResult(*row) for row in notes["results"]]
        return index, done, (arrays, notes["errors"])

    def save(self, index, done, errors, optimizer):
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
        """Runs a training stage; its first and last error, and that of no attention.

        Args:
            stage: `Planned`.
            index: Which it is in the plan.
            first: Steps of the plan before it.
            done: Steps of it that a checkpoint has seen.
            kept: Its arrays and errors.
        """
        settings = self.settings
        trainer = self.trainer(stage)
        variables = self.selected[stage.name]
        if stage.layer is not None:
            own = {id(v) for v in self.layers[stage.layer].variables}
            variables = [v for v in variables if id(v) in own]
        if not variables:
            return ()
        arrays, errors = kept or ({}, [])
        with only_training(self.model, variables):
            optimizer = self.optimizer(stage, variables)
            trainer.compile(optimizer=optimizer, jit_compile=settings["jit_compile"])
            optimizer = trainer.optimizer
            optimizer.build(trainer.trainable_variables)
            if done:
                count = len(optimizer.variables)
                values = [arrays[f"optimizer{i}"] for i in range(count)]
                assign(optimizer.variables, values)
            watch = Watch(
                trainer.trainable_variables, done, list(errors),
                lambda done, errors: self.save(index, done, errors, optimizer),
                settings["save_every"], stage.steps,
            )  # fmt: skip
            if stage.steps > done:
                self.fit(trainer, stage, first, done, watch)
        return *watch.ends(), float(getattr(trainer, "control", 1.0))

    def fit(self, trainer, stage, first, done, watch):
        """Keras' own `fit` for the steps left, under watch."""
        if self.settings["verbose"] not in (0, "0"):
            left = stage.steps - done
            print(f"Stage {stage.name!r}: {left} steps, zero attention has an error of "
                  f"{getattr(trainer, 'control', 1.0):.3f}")  # fmt: skip
        try:
            trainer.fit(
                self.inputs(first + done),
                steps_per_epoch=stage.steps - done,
                epochs=1,
                shuffle=False,
                callbacks=[watch, *self.settings["callbacks"]],
                verbose=self.settings["verbose"],
            )
        except NotFinite:
            assign(watch.variables, watch.good)
            step = watch.done
            raise ValueError(
                f"The loss of stage {stage.name!r} is not finite at its step {step} "
                f"(batch {first + step} of the data). The weights of step "
                f"{max(step - 1, 0)}, the last good ones, are kept. Look for NaN in "
                "that batch, or use a smaller learning rate."
            ) from None
        finally:
            for variable in watch.variables:
                _forget_gradient(variable)

    def trainer(self, stage):
        """The Keras model that trains in a stage."""
        settings = self.settings
        if stage.name == "features":
            trainer = FeaturesStage(
                self.teacher, settings["objective"], settings["window_dropout"]
            )
            trainer.control = trainer.without_attention(self.batches(0))
            return trainer
        if stage.layer is None:
            return self.whole
        i = stage.layer
        return AttentionStage(
            self.teacher, self.layers[i : i + 1], self.layers[:i],
            settings["window_dropout"],
        )  # fmt: skip

    def optimizer(self, stage, variables):
        """A fresh copy of the optimizer, or the default one."""
        optimizer = self.settings["optimizer"]
        if optimizer is not None:
            optimizer = type(optimizer).from_config(optimizer.get_config())
        else:
            maps = {id(v) for v in self.of_maps}
            rate = OWN_RATE
            if all(id(v) in maps for v in variables):
                rate = RATES[stage.name]
            warmup = max(1, stage.steps // 20)
            optimizer = keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(
                    rate / 20, max(1, stage.steps - warmup), alpha=1 / 20,
                    warmup_target=rate, warmup_steps=warmup,
                )
            )  # fmt: skip
        if any(x.compute_dtype == "float16" for x in self.layers):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        return optimizer

    def inputs(self, start):
        """What the stages take, from a step of the data on."""
        for step, batch in enumerate(self.batches.from_step(start), start):
            yield (self.with_noise(batch, step),)

    def with_noise(self, batch, step):
        """A batch and its random numbers, `(B, L + 1)`."""
        rows = len(keras.tree.flatten(batch)[0])
        seed = np.random.SeedSequence([self.batches.seed, 1, step])
        generator = np.random.Generator(np.random.Philox(seed))
        noise = generator.random((rows, len(self.layers) + 1), dtype="float32")
        return {"x": batch, "noise": noise}

    def measured(self):
        """Errors of heads on the first batches, `(L, N)`, and those of the mean of V.

        NaN for heads that a layer has less than others.
        """
        total = {name: 0 for name in QUANTITIES}
        for step in range(FEW):
            inputs = self.with_noise(self.batches(step), step)
            inputs["noise"][:] = 1  # leaves no window out
            found = run(self.model, inputs, self.whole.predict_on_batch)
            total = {k: x + found[k].sum(0, keepdims=True) for k, x in total.items()}
        found = (keras.ops.convert_to_numpy(x) for x in relative(total))
        error, _, control, heads = found
        if not np.any(heads):
            raise ValueError("`data` must hold a real token. Received: padding alone.")
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


def _shared(total, parts):
    """Iterates over whole numbers that add up to `total`, as equal as can be."""
    for i in range(parts):
        yield total // parts + (i < total % parts)


def _once(variables):
    return list({id(v): v for v in variables}.values())


def _forget_gradient(variable):
    """PyTorch keeps a gradient with each weight."""
    if keras.backend.backend() == "torch":
        variable.value.grad = None
