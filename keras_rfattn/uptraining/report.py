"""The report that `uptrain` returns, and the clock that times its parts."""

import collections
import time
from dataclasses import dataclass

import numpy as np

# Names of everything that is not a stage, in the order in which it begins.
PREPARING, BEFORE = "preparing", "measuring before"
SAVING, AFTER = "saving", "measuring after"
OVERHEAD = PREPARING, BEFORE, SAVING, AFTER


class Clock:
    """Assigns all of the time since its creation to names."""

    def __init__(self):
        self.seconds, self.last = collections.Counter(), time.perf_counter()

    def lap(self, name):
        """Adds the time since the last lap to a name, and returns the name's total."""
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now
        return self.seconds[name]

    def add(self, seconds):
        """Adds the time of an interrupted run, a dict from names to seconds."""
        self.seconds.update(seconds)


@dataclass(frozen=True)
class StageResult:
    """The result of one stage.

    Attributes:
        name: `"calibrate"`, `"attention"` or `"features"`.
        steps: Number of steps that were done.
        seconds: Duration, including compilation.
        first: Mean error of the first tenth of the steps; `None` without steps.
        last: Mean error of the last tenth of the steps; `None` without steps.
        no_attention: Error if attention outputs 0; `None` without steps.
        note: Text that says which maps the stage left unchanged; empty if none.
        measure: What these errors are; empty without steps.
    """

    name: str
    steps: int
    seconds: float
    first: float | None = None
    last: float | None = None
    no_attention: float | None = None
    note: str = ""
    measure: str = ""

    @classmethod
    def of(cls, name, seconds, errors=(), no_attention=None, note="", measure=""):
        """Returns the result of a stage from its errors, one per step."""
        if not errors:
            return cls(name, 0, seconds, note=note)
        ends = at_last(errors[::-1]), at_last(errors)
        return cls(name, len(errors), seconds, *ends, no_attention, note, measure)


@dataclass(frozen=True)
class LayerResult:
    """Relative squared errors of the outputs of one attention layer, by head.

    They are measured on the inputs that the layer has in the softmax model. An output
    of 0 has an error of 1. Heads that stay softmax are left out.

    Attributes:
        path: Path of the layer.
        before: Error of each head before training.
        after: Error of each head after training.
        uniform_attention: Error of uniform attention for each head, as a control.
    """

    path: str
    before: tuple
    after: tuple
    uniform_attention: tuple


@dataclass(frozen=True)
class UptrainingReport:
    """The results of `uptrain`; prints as a table.

    Attributes:
        model: Class and name of the model.
        mechanism: Names of the feature maps.
        width: Their numbers of features.
        stages: Tuple of `StageResult`, in the order in which the stages ran.
        overhead: Tuple of `(name, seconds)` for everything that is not a stage:
            preparing (building the teacher, finding the order of layers), measuring
            before and after, and saving.
        layers: Tuple of `LayerResult`.
        trained: Paths of the trained weights, except those of feature maps.
        parameters: Number of trained parameters, including those of feature maps.
        seed: Seed of the order of the data.
        peak_memory: Peak memory of the process in bytes: of the accelerator if there
            is one, otherwise of main memory. `None` if it is unknown.
    """

    model: str
    mechanism: str
    width: str
    stages: tuple
    overhead: tuple
    layers: tuple
    trained: tuple
    parameters: int
    seed: int
    peak_memory: int | None

    @property
    def before(self):
        """Mean error over layers and heads before training."""
        return mean(layer.before for layer in self.layers)

    @property
    def after(self):
        """Mean error over layers and heads after training."""
        return mean(layer.after for layer in self.layers)

    @property
    def uniform_attention(self):
        """Mean error of uniform attention over layers and heads."""
        return mean(layer.uniform_attention for layer in self.layers)

    @property
    def seconds(self):
        """Duration of the whole call: all stages and the overhead."""
        overhead = sum(seconds for _, seconds in self.overhead)
        return overhead + sum(stage.seconds for stage in self.stages)

    def __str__(self):
        lines = [headline(self.model, self.mechanism, self.width)]
        lines.append(
            f"{'stage':<12}{'steps':>6}{'minutes':>9}{'first':>10}{'last':>10}"
            f"{'no attention':>14}  measure"
        )
        for stage in self.stages:
            line = _minutes(stage.name, stage.steps, stage.seconds)
            if stage.first is not None:
                errors = f"{stage.first:>10.4f}{stage.last:>10.4f}"
                line += f"{errors}{stage.no_attention:>14.3f}  {stage.measure}"
            lines.append(line)
        lines.append(_minutes("other", "", sum(x for _, x in self.overhead)))
        steps = sum(stage.steps for stage in self.stages)
        lines.append(_minutes("all", steps, self.seconds))
        lines += [f"{x.name}: {x.note}" for x in self.stages if x.note]
        lines += ["", "Relative squared error of attention outputs (no attention: 1)"]
        width = max([len(layer.path) for layer in self.layers] + [5])
        head = f"{'layer':<{width}}{'before':>9}{'after':>9}{'uniform attention':>19}"
        lines.append(head + "  heads after")
        for layer in self.layers:
            rows = layer.before, layer.after, layer.uniform_attention
            heads = " ".join(f"{x:.2f}" for x in layer.after)
            numbers = (mean([row]) for row in rows)
            lines.append(_line(layer.path, width, *numbers) + f"  {heads}")
        totals = self.before, self.after, self.uniform_attention
        lines.append(_line("all", width, *totals))
        lines.append(f"{self.parameters:,} parameters trained, seed {self.seed}")
        if self.trained:
            lines.append(
                f"{len(self.trained)} of the checkpoint's own weights among them: "
                f"{', '.join(self.trained[:4])}{', ...' * (len(self.trained) > 4)}"
            )
        if self.peak_memory is not None:
            lines.append(f"peak memory {self.peak_memory / 2**30:.2f} GiB")
        return "\n".join(lines)

    __repr__ = __str__


def headline(model, mechanism, width):
    """Returns the line above progress and reports."""
    width = f", width {width}" if width else ""
    return f"Uptraining of {model} with {mechanism}{width}"


def at_last(errors):
    """Returns the mean of the last tenth of a list of errors by step."""
    return mean([errors[-max(1, len(errors) // 10) :]])


def _minutes(name, steps, seconds):
    return f"{name:<12}{steps:>6}{seconds / 60:>9.1f}"


def _line(name, width, before, after, uniform):
    return f"{name:<{width}}{before:>9.3f}{after:>9.3f}{uniform:>19.3f}"


def mean(rows):
    """Returns the mean of all numbers in an iterable of tuples."""
    return float(np.mean([x for row in rows for x in row]))
