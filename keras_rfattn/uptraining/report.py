"""The report that `uptrain` returns."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StageResult:
    """The result of one stage; errors are `None` without steps."""

    name: str
    steps: int  # that were done
    seconds: float  # including compilation
    first: float | None = None  # mean error of the first tenth of the steps
    last: float | None = None  # mean error of the last tenth of the steps
    no_attention: float | None = None  # error if attention outputs 0
    note: str = ""  # which maps the stage left unchanged
    measure: str = ""  # what these errors are


@dataclass(frozen=True)
class LayerResult:
    """Relative squared errors of the outputs of one attention layer, by head."""

    # They are measured on the inputs that the layer has in the softmax model. An output
    # of 0 has an error of 1. Heads that stay softmax are left out.

    path: str
    before: tuple  # before training
    after: tuple  # after training
    uniform_attention: tuple  # of uniform attention, as a control


@dataclass(frozen=True)
class UptrainingReport:
    """The results of `uptrain`; prints as a table.

    Attributes:
        model: Class and name of the model.
        mechanism: Names of the feature maps.
        stages: Tuple of `StageResult`, in the order in which the stages ran.
        seconds: Duration of the whole call: stages, measuring and saving.
        layers: Tuple of `LayerResult`.
        trained: Paths of the trained weights, except those of feature maps.
        parameters: Number of trained parameters, those of feature maps included.
        seed: Seed of the order of the data.
    """

    model: str
    mechanism: str
    stages: tuple
    seconds: float
    layers: tuple
    trained: tuple
    parameters: int
    seed: int

    @property
    def before(self):
        """Mean error over layers and heads before training."""
        return _mean(layer.before for layer in self.layers)

    @property
    def after(self):
        """Mean error over layers and heads after training."""
        return _mean(layer.after for layer in self.layers)

    @property
    def uniform_attention(self):
        """Mean error of uniform attention over layers and heads."""
        return _mean(layer.uniform_attention for layer in self.layers)

    def __str__(self):
        lines = [
            f"Uptraining of {self.model} with {self.mechanism}",
            "stage        steps  minutes     first      last  no attention  measure",
        ]
        steps = sum(stage.steps for stage in self.stages)
        for stage in (*self.stages, StageResult("all", steps, self.seconds)):
            line = f"{stage.name:<12}{stage.steps:>6}{stage.seconds / 60:>9.1f}"
            if stage.first is not None:
                line += f"{stage.first:>10.4f}{stage.last:>10.4f}"
                line += f"{stage.no_attention:>14.3f}  {stage.measure}"
            lines.append(line)
        lines += [f"{x.name}: {x.note}" for x in self.stages if x.note]
        lines += ["", "Relative squared error of attention outputs (no attention: 1)"]
        rows = [(x.path, x.before, x.after, x.uniform_attention) for x in self.layers]
        rows.append(("all", self.before, self.after, self.uniform_attention))
        width = max(len(path) for path, *_ in rows) + 2
        lines.append(f"{'layer':<{width}} before    after  uniform attention")
        for path, *errors in rows:
            before, after, uniform = map(np.mean, errors)
            lines.append(f"{path:<{width}}{before:>7.3f}{after:>9.3f}{uniform:>19.3f}")
        lines.append(f"{self.parameters:,} parameters trained, seed {self.seed}")
        if self.trained:
            lines.append(
                f"{len(self.trained)} of the checkpoint's own weights among them: "
                f"{', '.join(self.trained[:4])}{', ...' * (len(self.trained) > 4)}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def _mean(rows):
    """Returns the mean of all numbers in an iterable of tuples."""
    return float(np.mean([x for row in rows for x in row]))
