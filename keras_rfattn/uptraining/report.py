"""What uptraining did: the report that `uptrain` returns."""

from dataclasses import dataclass

import keras
import numpy as np

from keras_rfattn.uptraining.clock import BEFORE
from keras_rfattn.uptraining.clock import PREPARING


@dataclass(frozen=True)
class StageResult:
    """One stage.

    Attributes:
        name: `"calibrate"`, `"attention"` (of a layer, when bottom up) or `"features"`.
        steps: How many were done.
        seconds: How long it took, compilation included.
        first: Error of the first tenth of the steps, mean; `None` without steps.
        last: Of the last tenth.
        zero: Error of zero attention.
        note: What the stage has left as it was; empty if nothing.
    """

    name: str
    steps: int
    seconds: float
    first: float | None = None
    last: float | None = None
    zero: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name, errors, seconds, zero, note=""):
        """The result of a stage with these errors, one a step."""
        ends = None, None, None
        if errors:
            count = max(1, len(errors) // 10)
            ends = mean([errors[:count]]), mean([errors[-count:]]), zero
        return cls(name, len(errors), seconds, *ends, note)


@dataclass(frozen=True)
class LayerResult:
    """One attention layer: relative squared errors of its heads' outputs.

    They are measured on the inputs that the layer has in the softmax model; an output
    of 0 has an error of 1.

    Attributes:
        path: Of the layer.
        before: Error of each head before training, without those that stay softmax.
        after: After it.
        mean_of_v: Of uniform attention, the control.
    """

    path: str
    before: tuple
    after: tuple
    mean_of_v: tuple


@dataclass(frozen=True)
class UptrainingReport:
    """What `uptrain` did; prints as a table.

    Attributes:
        model: Class and name.
        mechanism: Names of the feature maps.
        stages: `StageResult`s.
        overhead: `(name, seconds)` of all that is not a stage: preparing (building
            the teacher, order of layers), measuring before and after, saving.
        layers: `LayerResult`s.
        trained: Paths of the model's own weights that were trained, those of feature
            maps not among them.
        parameters: Number of trained parameters.
        dropped: Number of texts that `exclude` dropped.
        seed: Of the order of the data.
        peak_memory: Bytes the process has held at most, of the accelerator where there
            is one, else of main memory.
    """

    model: str
    mechanism: str
    stages: tuple
    overhead: tuple
    layers: tuple
    trained: tuple
    parameters: int
    dropped: int
    seed: int
    peak_memory: int | None

    @property
    def before(self):
        """Error before training, mean over layers and heads."""
        return mean(layer.before for layer in self.layers)

    @property
    def after(self):
        """Error after training, mean over layers and heads."""
        return mean(layer.after for layer in self.layers)

    @property
    def mean_of_v(self):
        """Error of uniform attention, mean over layers and heads."""
        return mean(layer.mean_of_v for layer in self.layers)

    @property
    def seconds(self):
        """How long the whole call took: all stages, and all that is not a stage."""
        overhead = sum(seconds for _, seconds in self.overhead)
        return overhead + sum(stage.seconds for stage in self.stages)

    def __str__(self):
        lines = [f"Uptraining of {self.model} with {self.mechanism}"]
        head = f"{'stage':<16}{'steps':>6}{'minutes':>9}"
        lines.append(head + f"{'error':>10}{'at the end':>12}{'zero attention':>16}")
        first = [x for x in self.overhead if x[0] in (PREPARING, BEFORE)]
        last = [x for x in self.overhead if x not in first]
        lines += [_minutes(name, "", seconds) for name, seconds in first]
        for stage in self.stages:
            line = _minutes(stage.name, stage.steps, stage.seconds)
            if stage.first is not None:
                line += f"{stage.first:>10.4f}{stage.last:>12.4f}{stage.zero:>16.3f}"
            lines.append(line)
        lines += [_minutes(name, "", seconds) for name, seconds in last]
        steps = sum(stage.steps for stage in self.stages)
        lines.append(_minutes("all", steps, self.seconds))
        lines += [f"{x.name}: {x.note}" for x in self.stages if x.note]
        width = max([len(layer.path) for layer in self.layers] + [5])
        lines += ["", "Relative squared error of attention outputs (zero output: 1)"]
        head = f"{'layer':<{width}}{'before':>9}{'after':>9}{'mean of V':>11}"
        lines.append(head + "   heads after")
        for layer in self.layers:
            numbers = (mean([x]) for x in (layer.before, layer.after, layer.mean_of_v))
            heads = " ".join(f"{x:.2f}" for x in layer.after)
            lines.append(_line(layer.path, width, *numbers) + f"   {heads}")
        lines.append(_line("all", width, self.before, self.after, self.mean_of_v))
        lines.append(f"{self.parameters:,} parameters trained, seed {self.seed}")
        if self.trained:
            lines.append(
                f"{len(self.trained)} of the checkpoint's own weights among them: "
                f"{', '.join(self.trained[:4])}{', ...' * (len(self.trained) > 4)}"
            )
        if self.dropped:
            lines.append(f"{self.dropped} texts dropped that `exclude` names")
        if self.peak_memory is not None:
            lines.append(f"peak memory {self.peak_memory / 2**30:.2f} GiB")
        return "\n".join(lines)

    __repr__ = __str__


def _minutes(name, steps, seconds):
    return f"{name:<16}{steps:>6}{seconds / 60:>9.1f}"


def _line(name, width, before, after, mean_of_v):
    return f"{name:<{width}}{before:>9.3f}{after:>9.3f}{mean_of_v:>11.3f}"


def mean(rows):
    """The mean of all numbers in an iterable of tuples."""
    return float(np.mean([x for row in rows for x in row]))


def peak_memory():
    """Bytes held at most so far, by the accelerator if there is one, or `None`."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        found = [d.memory_stats() for d in jax.local_devices()]
        peaks = [x["peak_bytes_in_use"] for x in found if x]
        if peaks:
            return max(peaks)
    elif backend == "torch":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
    elif backend == "tensorflow":
        import tensorflow as tf

        if tf.config.list_physical_devices("GPU"):
            return tf.config.experimental.get_memory_info("GPU:0")["peak"]
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
